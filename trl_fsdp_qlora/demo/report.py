"""What a person looks at after a run: curves as a picture, answers beside the right ones."""

import torch

from ..curves import plot_points, points_of, save_picture


def plot_curves(log_history: list[dict], path: str, title: str = "") -> str:
    """Draw the loss (training and held out), the gradient norm and the learning rate over steps into a PNG file.

    Args:
        log_history: `trainer.state.log_history`.
        path: of the PNG file.

    Raises:
        ValueError: if nothing was logged.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    panels = [
        ("loss", [("loss", "training"), ("eval_loss", "held out")]),
        ("gradient norm", [("grad_norm", None)]),
        ("learning rate", [("learning_rate", None)]),
    ]
    panels = [(name, curves) for name, curves in panels if any(points_of(log_history, key) for key, _ in curves)]
    if not panels:
        raise ValueError("Nothing was logged, so there are no curves to draw. Set `logging_steps`.")
    figure, axes = plt.subplots(1, len(panels), figsize=(5 * len(panels), 3.6), squeeze=False)
    for axis, (name, curves) in zip(axes[0], panels, strict=True):
        for key, label in curves:
            points = points_of(log_history, key)
            if points:
                plot_points(axis, points, label, dots=key == "eval_loss")
        axis.set_xlabel("step")
        axis.set_title(name)
        axis.grid(alpha=0.3)
        if name == "loss" and _spans_decades(axis.get_lines()):
            axis.set_yscale("log")
        if any(label for _, label in curves):
            axis.legend()
    figure.suptitle(title)
    save_picture(figure, path)
    plt.close(figure)
    return path


def _spans_decades(lines: list) -> bool:
    """Whether a linear axis would flatten the lower part of these curves."""
    values = [value for line in lines for value in line.get_ydata()]
    return min(values) > 0 and max(values) > 10 * min(values)


@torch.no_grad()
def answers(model, tokenizer, rows: list[dict], max_new_tokens: int = 40) -> list[str]:
    """Greedy answers to the prompts of conversational prompt/completion rows, all at once."""
    was_training = model.training
    model.eval()
    side, tokenizer.padding_side = tokenizer.padding_side, "left"
    try:
        inputs = tokenizer.apply_chat_template(
            [row["prompt"] for row in rows], add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
        ).to(model.device)
        tokens = model.generate(
            **inputs, max_new_tokens=max_new_tokens, do_sample=False, use_cache=True, pad_token_id=tokenizer.pad_token_id
        )
    finally:
        tokenizer.padding_side = side
        model.train(was_training)
    new = tokens[:, inputs["input_ids"].shape[1] :]
    return [text.strip() for text in tokenizer.batch_decode(new, skip_special_tokens=True)]


def right_answers(rows: list[dict]) -> list[str]:
    return [row["completion"][-1]["content"] for row in rows]


def exact_matches(rows: list[dict], given: list[str]) -> int:
    """How many of the answers are right, letter for letter."""
    return sum(answer == right for answer, right in zip(given, right_answers(rows), strict=True))


def answer_table(rows: list[dict], before: list[str], after: list[str], width: int = 100) -> str:
    """Question, answer before, answer after, and the right one, one block a row."""
    blocks = []
    for row, old, new, right in zip(rows, before, after, right_answers(rows), strict=True):
        mark = "=" if new == right else "x"
        lines = [("question", row["prompt"][-1]["content"]), ("before", old), (f"after {mark}", new), ("right", right)]
        blocks.append("\n".join(f"  {name:<8}  {' '.join(text.split())[:width]}" for name, text in lines))
    return "\n\n".join(blocks)
