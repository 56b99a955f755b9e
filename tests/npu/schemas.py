"""The schemas of the operators we call: rows of torch_npu 2.13.0's own table."""

from __future__ import annotations

from pathlib import Path

SCHEMAS = {
    line.partition("(")[0].removeprefix("npu::"): line.partition("\t")[0]
    for line in (Path(__file__).parent / "schemas.tsv").read_text().splitlines()
}
