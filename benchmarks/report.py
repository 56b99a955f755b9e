"""How every benchmark reports: a table for people and, with `--json`, one object on stdout for machines.

A `Bar` is one measured figure beside the aim it is held to; an aim of None makes it a mere observation, which is
always ok. With `--json` stdout carries the object alone and the table goes to stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One figure; `better` says on which side of the aim it should lie, `unit` and `note` are for the reader."""

    name: str
    value: float
    aim: float | None = None
    better: Literal["higher", "lower"] = "higher"
    unit: str = ""
    note: str = ""

    @property
    def ok(self) -> bool:
        if self.aim is None:
            return True
        return self.value >= self.aim if self.better == "higher" else self.value <= self.aim

    def as_dict(self) -> dict[str, object]:
        return {
            "name": self.name,
            "value": self.value,
            "aim": self.aim,
            "ok": self.ok,
            "better": self.better,
            "unit": self.unit,
            "note": self.note,
        }


def arguments(description: str) -> argparse.ArgumentParser:
    """A parser that knows `--json`; a benchmark adds its own options."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout, the table on stderr")
    return parser


def publish(title: str, bars: Sequence[Bar], *, as_json: bool, details: Mapping[str, object] | None = None) -> int:
    """Prints the bars and returns the process's exit code: 0 when every bar is ok, else 1.

    `details` (JSON types: machine, sizes, repetitions) is added to the object under that name.
    """
    Console(stderr=as_json).print(_table(title, bars))
    if as_json:
        document = {"title": title, "bars": [bar.as_dict() for bar in bars], "details": dict(details or {})}
        sys.stdout.write(json.dumps(document, indent=2) + "\n")
    return 0 if all(bar.ok for bar in bars) else 1


def _table(title: str, bars: Sequence[Bar]) -> Table:
    table = Table(title=title)
    table.add_column("bar")
    table.add_column("value", justify="right")
    table.add_column("aim", justify="right")
    table.add_column("ok")
    table.add_column("note")
    for bar in bars:
        sign = ">=" if bar.better == "higher" else "<="
        aim = "" if bar.aim is None else f"{sign} {bar.aim:.4g}"
        verdict = "" if bar.aim is None else "yes" if bar.ok else "[red]NO[/red]"
        table.add_row(bar.name, f"{bar.value:.4g} {bar.unit}".strip(), aim, verdict, bar.note)
    return table
