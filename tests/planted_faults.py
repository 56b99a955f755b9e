"""Plants faults in a copy of the project, one at a time, and shows that its quick tests find each.

Used by `kv_mutants.py` and `engine_mutants.py`, which list the faults. A fault is text that is replaced.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
TIMEOUT_S = 300.0
NO_SHRINKING = """from hypothesis import Phase, settings
settings.register_profile("mutants", phases=[Phase.explicit, Phase.generate], database=None)
settings.load_profile("mutants")
"""  # a failure is enough, its smallest example is of no interest


@dataclass(frozen=True)
class Mutant:
    """`file` below the folder that the faults are planted in says `wrong` where it says `right`."""

    fault: str
    file: str
    right: str
    wrong: str


@dataclass(frozen=True)
class Planting:
    """Faults in files below `folder`, in copies of what `copied` names (globs).

    They are found by `tests`: groups of globs, one after the other, so that most faults cost the first group's imports.
    """

    folder: str
    copied: Sequence[str]
    tests: Sequence[Sequence[str]]

    def is_killed(self, mutant: Mutant | None) -> bool:
        with tempfile.TemporaryDirectory() as name:
            copy = Path(name)
            for path in _matching(ROOT, self.copied):
                _copy(path, copy / path.relative_to(ROOT))
            if mutant is not None:
                _plant(mutant, copy / self.folder / mutant.file)
            (copy / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
            (copy / "conftest.py").write_text(NO_SHRINKING)
            return not all(self._tests_pass(copy, group) for group in self.tests)

    def _tests_pass(self, copy: Path, group: Sequence[str]) -> bool:
        tests = [str(path) for path in _matching(copy, group)]
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
        # the copy comes before whatever is installed
        environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired:
            return False
        # 2: a fault that shows as soon as a test's module is imported
        if done.returncode not in (0, 1, 2):
            raise SystemExit(f"the tests did not run: {done.stdout}{done.stderr}")
        return done.returncode == 0


def _matching(folder: Path, patterns: Sequence[str]) -> list[Path]:
    """In the order of the patterns; one that matches nothing is a mistake."""
    found = {pattern: sorted(folder.glob(pattern)) for pattern in patterns}
    if missing := [pattern for pattern, paths in found.items() if not paths]:
        raise SystemExit(f"nothing matches {missing}")
    return [path for paths in found.values() for path in paths]


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))
    else:
        shutil.copy(source, target)


def _plant(mutant: Mutant, target: Path) -> None:
    text = target.read_text()
    if mutant.right not in text:
        raise SystemExit(f"{mutant.fault}: {mutant.file} no longer says {mutant.right!r}")
    target.write_text(text.replace(mutant.right, mutant.wrong))


def run(planting: Planting, mutants: Sequence[Mutant]) -> int:
    """Prints one row per fault and "killed / planted"; the exit status, 1 when one survives."""
    if planting.is_killed(None):
        raise SystemExit("the tests fail without a fault")
    results = []
    with ThreadPoolExecutor(max_workers=2) as executor:
        for mutant, killed in zip(mutants, executor.map(planting.is_killed, mutants), strict=True):
            print(f"{'killed' if killed else 'SURVIVED':<9} {mutant.file:<32} {mutant.fault}", flush=True)
            results.append(killed)
    print(f"{sum(results)} / {len(results)} killed")
    return 0 if all(results) else 1
