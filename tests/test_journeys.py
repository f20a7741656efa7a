"""The journeys of the documentation run as notebooks, each from its data to its picture."""

import re
from pathlib import Path

import jupytext
import pytest
from nbclient import NotebookClient

PAGES = Path(__file__).parents[1] / "docs" / "journeys"

# What a page prints on its way: numbers that are right, as one pattern each.
RESULTS = {
    "train": r"32 shapes, [1-6] executables?: .*accuracy [89]\d%.*ahead after [0-9] shapes",
    "embed": r"\d+ executables: .*accuracy [7-9]\d%.*lists: ids; shared: params",
    "serve": r"^1 compiled.*5 of them from files.*calls_total\S* 50\.0.*compiles_total\S* 5\.0",
    "generate": r"ti\|ck, tock, tick.*one p\|otato, two.*Padded\(float32\[\d+, 64\] in \[128, 64",
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_a_journey_ends_with_its_result_and_a_picture(page: Path, tmp_path: Path) -> None:
    notebook = jupytext.read(page)
    where = {"metadata": {"path": str(tmp_path)}}
    NotebookClient(notebook, timeout=300, resources=where).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", ())]
    told = {"stdout": "", "stderr": ""}
    for output in outputs:
        if output.output_type == "stream":
            told[output.name] += output.text
    assert re.search(RESULTS[page.stem], told["stdout"], re.DOTALL), told["stdout"]
    assert "Warning" not in told["stderr"]
    assert "image/png" in outputs[-1].data
