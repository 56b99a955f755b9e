"""What the controller's next life reads is what its last one wrote, or nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from pd_service.cluster.desired import Desired, DesiredFile

ASKED = Desired(replicas={"prefill": 3, "decode": 0}, drains={"decode/1f": 12.5}, is_stopping=True, life=4, port=4711)


def test_the_next_life_reads_what_the_last_one_wrote(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "on demand"
    DesiredFile("one", folder).save(ASKED)
    assert DesiredFile("one", folder).load() == ASKED
    assert DesiredFile("other", folder).load() is None


def test_each_change_replaces_the_whole_file_and_leaves_no_other(tmp_path: Path) -> None:
    file = DesiredFile("one", tmp_path)
    desired = Desired(replicas={"prefill": 1, "decode": 1})
    for number in (1, 2, 2):
        desired.replicas["decode"] = number
        file.save(desired)
        assert DesiredFile("one", tmp_path).load() == desired
        assert len(list(tmp_path.iterdir())) == 1
    file.delete()
    file.delete()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"format": 2}', '{"format": 1, "sizes": {}}', "null"])
def test_a_file_that_cannot_be_read_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "one.json").write_text(text)
    assert DesiredFile("one", tmp_path).load() is None
