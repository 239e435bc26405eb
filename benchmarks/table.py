"""Make the tables of docs/benchmarks.md from the results.

    python benchmarks/table.py            # rewrite docs/benchmarks.md between its markers
    python benchmarks/table.py --check    # fail if a table there is not what the results say
"""

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results", ROOT / "docs" / "benchmarks.md"
NAMES = {
    "trl": "TRL, its defaults",
    "trl_bf16": "TRL, unquantised parts in bf16",
    "ours": "**this project**",
    "ours_plain": "this project, `fused=False`",
    "ours_kept": "this project, `gradient_checkpointing=False`",
    "ours_16bit": "this project, `load_in_4bit=False`",
    "unsloth": "Unsloth",
    "ours_fsdp_config": "this project, FSDP2 config, one process",
}


def load(pattern: str) -> list[dict]:
    return [entry for file in sorted(RESULTS.glob(pattern)) for entry in json.loads(file.read_text())]


def where(entry: dict) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in entry["versions"].items())
    return f"{entry['gpu']}, {entry['weights']} weights; {versions}."


def memory_table() -> str:
    entries = load("memory_*.json")
    if not entries:
        return "No results yet."
    lines = [
        "| model | seq × batch | contender | load peak GiB | train peak GiB | reserved GiB | tokens/s |",
        "|---|---|---|---|---|---|---|",
    ]
    for e in entries:
        start = f"| {e['model'].upper()} | {e['seq']} × {e['batch']} | {NAMES.get(e['contender'], e['contender'])} |"
        if "error" in e:
            lines.append(f"{start} failed: {e['error']} | | | |")
            continue
        numbers = f" {e['load_peak_gib']:.2f} | {e['train_peak_gib']:.2f} | {e['train_reserved_gib']:.2f} | {e['tokens_per_second']:,} |"
        lines.append(start + numbers)
    return "\n".join([*lines, "", where(next(e for e in entries if "gpu" in e))])


def longest_table() -> str:
    entries = load("longest_*.json")
    if not entries:
        return "No results yet."
    limits = sorted({found["limit_gib"] for e in entries for found in e["longest_sequences"]})
    lines = [f"| model | {' | '.join(f'{limit:g} GiB' for limit in limits)} |", "|---" * (len(limits) + 1) + "|"]
    for e in entries:
        by_limit = {found["limit_gib"]: found["longest"] for found in e["longest_sequences"]}
        cells = [f"{by_limit[limit]:,}" if by_limit.get(limit) else "–" for limit in limits]
        extra = f" ({', '.join(e['extra'])})" if e["extra"] else ""
        lines.append(f"| {e['model'].upper()}{extra} | {' | '.join(cells)} |")
    return "\n".join([*lines, "", where(entries[0])])


def speed_table(entries: list[dict] | None = None) -> str:
    """Each contender beside stock TRL in the same run, with its defaults or else in bf16; of all results if none are given."""
    entries = load("speed_*.json") if entries is None else entries
    if not entries:
        return "No results yet."
    lines = [
        "| model | seq × batch | contender | tokens/s | × stock | step ms | GPU busy ms | launches | of the floor | peak GiB (reserved) |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for e in entries:
        start = f"| {e['model'].upper()} | {e['seq']} × {e['batch']} | {NAMES.get(e['contender'], e['contender'])} |"
        if "error" in e:
            lines.append(f"{start} failed: {e['error']} | | | | | | |")
            continue
        place = [other for other in entries if all(other[key] == e[key] for key in ("model", "seq", "batch")) and "error" not in other]
        stock = next((o for name in ("trl", "trl_bf16") for o in place if o["contender"] == name), None)
        ratio = f"{e['tokens_per_second'] / stock['tokens_per_second']:.2f}" if stock else ""
        lines.append(
            f"{start} {e['tokens_per_second']:,} | {ratio} | {e['step_ms']:.0f} | {e['busy_ms']:.0f} | {e['launches']:,} "
            f"| {e['floor']:.0%} | {e['train_peak_gib']:.2f} ({e['train_reserved_gib']:.2f}) |"
        )
    return "\n".join([*lines, "", *(where(e) for e in entries[:1] if "gpu" in e)])


TABLES = {"memory": memory_table, "speed": speed_table, "longest": longest_table}


def main() -> None:
    page = PAGE.read_text()
    made = page
    for name, table in TABLES.items():
        block = f"<!-- {name} -->\n{table()}\n<!-- /{name} -->"
        made = re.sub(rf"<!-- {name} -->.*?<!-- /{name} -->", lambda _, block=block: block, made, flags=re.S)
    if "--check" in sys.argv:
        if made != page:
            sys.exit("docs/benchmarks.md does not say what benchmarks/results says: run `python benchmarks/table.py`.")
        return
    PAGE.write_text(made)


if __name__ == "__main__":
    main()
