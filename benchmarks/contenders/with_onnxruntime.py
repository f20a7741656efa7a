"""onnxruntime: the graph of PyTorch's encoder, exported with open sizes."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.alone import Skipped, run_alone
from benchmarks.contenders import Contender
from benchmarks.encoder import LONGEST, Sizes, draw_weights


def session(weights: Any, sizes: Sizes) -> Contender:
    """One session for all sizes; exporting is part of its set-up, in a process of its own."""
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "encoder.onnx"
        outcome = run_alone(f"{__name__}:export", {"path": str(path)})
        if outcome.status != "ok":
            raise Skipped(f"the export to ONNX: {outcome.reason}")
        model = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def run(tokens: np.ndarray) -> np.ndarray:
        return model.run(None, {"tokens": tokens})[0]

    return Contender(run, lambda: 1)


def export(path: str) -> None:
    """Write the graph of PyTorch's encoder."""
    import torch

    from benchmarks.contenders.with_torch import Encoder

    sizes = {0: torch.export.Dim("b", min=1), 1: torch.export.Dim("s", min=1, max=LONGEST)}
    torch.onnx.export(
        Encoder(draw_weights()),
        (torch.zeros(3, 24, dtype=torch.int32),),
        path,
        input_names=["tokens"],
        dynamic_shapes=(sizes,),
        dynamo=True,
    )
