"""Laws of what `generate` shows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from pd_service.rpc import generation_pb2 as pb
from pd_service.views import AnswersInTurn, phases_table


@given(st.data(), st.lists(st.integers(0, 4), min_size=1, max_size=4))
def test_answers_are_shown_whole_and_one_after_another_however_they_come(
    data: st.DataObject, num_deltas: list[int]
) -> None:
    """And nothing that can be shown waits."""
    answers = [
        [*(pb.GenerateResponse(delta=pb.Delta(text=f"{i}.{k}", index=i)) for k in range(num)),
         pb.GenerateResponse(finish=pb.Finish(index=i, completion_tokens=num))]
        for i, num in enumerate(num_deltas)
    ]  # fmt: skip
    turns, shown, coming = AnswersInTurn(), [], [list(answer) for answer in answers]
    while any(coming):
        index = data.draw(st.sampled_from([i for i, rest in enumerate(coming) if rest]))
        shown += turns.take(coming[index].pop(0))
        turn = next((i for i, rest in enumerate(coming) if rest), len(coming))
        assert len(shown) == sum(len(a) for a in answers[:turn]) + (
            len(answers[turn]) - len(coming[turn]) if turn < len(answers) else 0
        )
    assert shown == [r.delta if r.HasField("delta") else r.finish for answer in answers for r in answer]


def test_the_table_tells_how_much_of_the_prompt_was_cached() -> None:
    console = Console(width=80, file=None)
    with console.capture() as captured:
        console.print(phases_table(pb.Finish(reason="stop", prompt_tokens=40, cached_tokens=32)))
    assert "32 tokens cached" in captured.get()
