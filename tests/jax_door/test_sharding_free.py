"""Shardings are removed from modules for one device, and modules for several are refused."""

from typing import Any

import pytest
from jax.interpreters import mlir
from jaxlib.mlir import ir

from bucketjit._jax.stablehlo import BadModule, read_module, write_module
from bucketjit._stages.modules.building import without_sharding

BODY = """
func.func public @main(%x: tensor<2xf32> {ARGUMENT}) -> tensor<2xf32> {
  %y = stablehlo.exponential %x {OPERATION} : tensor<2xf32>
  %z = STEP
  %r = stablehlo.add %y, %z : tensor<2xf32>
  return %r : tensor<2xf32>
}
"""
PLAIN = {"ARGUMENT": "", "OPERATION": "", "STEP": "stablehlo.negate %y : tensor<2xf32>"}
CALL = "stablehlo.custom_call @{}(%y) : (tensor<2xf32>) -> tensor<2xf32>"


def module(head: str = "", **parts: str) -> Any:
    text = BODY
    for name, part in {**PLAIN, **parts}.items():
        text = text.replace(name if name == "STEP" else f"{{{name}}}", part)
    with mlir.make_ir_context():
        return ir.Module.parse(f"{head}{text}")


def test_nothing_to_remove() -> None:
    plain = module()
    assert not without_sharding(plain)
    assert str(plain) == str(module())


@pytest.mark.parametrize(
    "given",
    [
        {"STEP": "sdy.sharding_constraint %y <@mesh, [{}]> : tensor<2xf32>"},
        {"STEP": CALL.format("Sharding")},
        {"OPERATION": '{mhlo.sharding = "{replicated}"}'},
        {"OPERATION": '{mhlo.frontend_attributes = {xla.sdy.sharding = "x", other = "kept"}}'},
        {"OPERATION": '{mhlo.frontend_attributes = {xla.sdy.sharding = "x"}}'},
        {"ARGUMENT": "{sdy.sharding = #sdy.sharding<@mesh, [{}]>, jax.buffer_donor = true}"},
    ],
)
def test_removed(given: dict[str, str]) -> None:
    sharded = module("sdy.mesh @mesh = <[]>\n", **given)
    assert without_sharding(sharded)
    text = str(read_module(write_module(sharded)))
    assert "sdy" not in text and "harding" not in text
    assert ("kept" in str(given)) is ("kept" in text)
    assert ("buffer_donor" in str(given)) is ("buffer_donor" in text)
    if "STEP" in given:
        assert "stablehlo.add %0, %0" in text  # the value that was constrained takes its place


@pytest.mark.parametrize("target", ["SPMDFullToShardShape", "SPMDShardToFullShape"])
def test_modules_for_several_devices(target: str) -> None:
    with pytest.raises(BadModule, match=f"for several devices, as it has '{target}'"):
        without_sharding(module(STEP=CALL.format(target)))
