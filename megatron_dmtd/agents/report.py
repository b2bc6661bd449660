"""A replay in figures: a line per policy, as JSON lines and as a table, and plots."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_dmtd.agents.replay import Turn
from megatron_dmtd.errors import CapabilityError
from megatron_dmtd.infra.files import replacing, write_atomically
from megatron_dmtd.infra.json_lines import to_line

#: the files of a report
SUMMARY_FILE, TABLE_FILE, PLOTS_FILE = "summary.jsonl", "report.md", "replay.png"


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """One policy over all trajectories and turns."""

    policy: str
    num_turns: int
    prompt_tokens: int
    new_tokens: int
    """Of all prompts, each counted when it first appeared. Without meaning where texts are shortened."""
    prefill_tokens: int
    cached_tokens: int
    repos_tokens: int
    drop_skipped_tokens: int
    cost: float
    first_token_s: float
    """Mean over all turns."""
    last_first_token_s: float
    """Mean over the last quarter of each trajectory, where histories are long."""
    most_active_tokens: int
    """Most prompt tokens that a first new token saw."""
    active_is_exact: bool
    most_held_tokens: int
    """Most tokens whose K and V one request has read or computed: the peak of the cache."""


def summarise(turns: Sequence[Turn]) -> list[Summary]:
    """A summary per policy, in the order of the turns."""
    return [_summary(policy, own) for policy, own in _by_policy(turns)]


def _by_policy(turns: Sequence[Turn]) -> Iterator[tuple[str, list[Turn]]]:
    for policy in dict.fromkeys(turn.policy for turn in turns):
        yield policy, [turn for turn in turns if turn.policy == policy]


def _summary(policy: str, turns: Sequence[Turn]) -> Summary:
    ends: dict[str, int] = {}
    for turn in turns:
        ends[turn.trajectory] = max(ends.get(turn.trajectory, 0), turn.turn + 1)
    late = [turn.first_token_s for turn in turns if turn.turn >= ends[turn.trajectory] * 3 // 4]
    return Summary(
        policy=policy,
        num_turns=len(turns),
        prompt_tokens=sum(turn.prompt_tokens for turn in turns),
        new_tokens=sum(turn.new_tokens for turn in turns),
        prefill_tokens=sum(turn.prefill_tokens for turn in turns),
        cached_tokens=sum(turn.cached_tokens for turn in turns),
        repos_tokens=sum(turn.repos_tokens for turn in turns),
        drop_skipped_tokens=sum(turn.drop_skipped_tokens for turn in turns),
        cost=sum(turn.cost for turn in turns),
        first_token_s=statistics.mean(turn.first_token_s for turn in turns),
        last_first_token_s=statistics.mean(late),
        most_active_tokens=max(turn.active_tokens for turn in turns),
        active_is_exact=all(turn.active_is_exact for turn in turns),
        most_held_tokens=max(turn.held_tokens for turn in turns),
    )


def table(summaries: Sequence[Summary]) -> str:
    """The summaries as a Markdown table; costs as multiples of the first one's too."""
    head = ["policy", "turns", "tokens computed", "cached", "rotated", "skipped", "cost"]
    head += ["time to first token, ms", "of the last quarter, ms", "most active", "peak of the cache"]
    rows = [head, ["---"] * len(head)]
    for one in summaries:
        ratio = one.cost / summaries[0].cost if summaries[0].cost else 1.0
        rows.append(
            [
                f"`{one.policy}`",
                f"{one.num_turns:,}",
                f"{one.prefill_tokens:,}",
                f"{one.cached_tokens:,}",
                f"{one.repos_tokens:,}",
                f"{one.drop_skipped_tokens:,}",
                f"{one.cost:.4g} ({ratio:.2f} x)",
                f"{1000 * one.first_token_s:.0f}",
                f"{1000 * one.last_first_token_s:.0f}",
                f"{one.most_active_tokens:,}" + ("" if one.active_is_exact else " (estimated)"),
                f"{one.most_held_tokens:,}",
            ]
        )
    return "\n".join("| " + " | ".join(row) + " |" for row in rows) + "\n"


def write_report(turns: Sequence[Turn], output: Path) -> str:
    """Write the summaries, the table and the plots to the folder `output`, each atomically. Returns the table.

    Raises `CapabilityError` without matplotlib, and `OSError`.
    """
    summaries = summarise(turns)
    write_atomically(output / SUMMARY_FILE, "".join(to_line(asdict(one)) for one in summaries))
    text = table(summaries)
    write_atomically(output / TABLE_FILE, f"# Replay\n\n{text}\n![Each turn of the first trajectory]({PLOTS_FILE})\n")
    draw(turns, output / PLOTS_FILE)
    return text


def draw(turns: Sequence[Turn], path: Path) -> None:
    """Plot the turns of the first trajectory, a line per policy. Raises `CapabilityError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise CapabilityError(
            found="matplotlib cannot be imported", required="matplotlib, to draw plots", remedy="pip install matplotlib"
        ) from error
    figure = Figure(figsize=(11, 7), dpi=100, layout="constrained")
    panels = figure.subplots(2, 2, sharex=True).flat
    own = [turn for turn in turns if turn.trajectory == turns[0].trajectory]
    for axes, (title, values) in zip(panels, _PLOTS.items(), strict=True):
        for policy, of_policy in _by_policy(own):
            ordered = sorted(of_policy, key=lambda turn: turn.turn)
            axes.plot([turn.turn for turn in ordered], values(ordered), label=policy, linewidth=1.2)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("turn")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
    figure.axes[0].legend(fontsize=8)
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})


def _sums(values: Sequence[float]) -> list[float]:
    found, total = [], 0.0
    for value in values:
        total += value
        found.append(total)
    return found


_PLOTS = {
    "tokens computed, all turns so far": lambda turns: _sums([turn.prefill_tokens for turn in turns]),
    "active tokens": lambda turns: [turn.active_tokens for turn in turns],
    "cost of all turns so far": lambda turns: _sums([turn.cost for turn in turns]),
    "time to first token, s": lambda turns: [turn.first_token_s for turn in turns],
}
