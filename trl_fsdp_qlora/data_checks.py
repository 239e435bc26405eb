"""Find what is wrong with training rows before a model is loaded, and say in which row."""

import json
import os
import reprlib
from collections.abc import Iterator

from datasets import Dataset, IterableDataset
from transformers import AutoTokenizer
from trl.data_utils import get_dataset_column_names

from .token_checks import check_masks, check_token_rows

CHAT_COLUMNS = ("messages", "conversations", "prompt", "completion")
IMAGE_COLUMNS = ("image", "images")
# What Gemma 4's chat template makes something of.
PART_TYPES = ("text", "image", "image_url", "audio", "input_audio", "video")
TEXT_PART = "{'type': 'text', 'text': '...'}"


def check_present(dataset: Dataset | IterableDataset | None, name: str) -> None:
    """Check that `dataset` is a dataset with a row; a stream is opened for its first.

    Raises:
        ValueError: if it is missing or empty.
        TypeError: if it is no dataset.
    """
    if dataset is None:
        raise ValueError(f"`{name}` is missing: pass a `datasets.Dataset` with text, prompt/completion or messages.")
    if not isinstance(dataset, (Dataset, IterableDataset)):
        raise TypeError(f"`{name}` must be a `datasets.Dataset` or `IterableDataset`, got {type(dataset).__name__}.")
    empty = len(dataset) == 0 if isinstance(dataset, Dataset) else next(iter(dataset), None) is None
    if empty:
        raise ValueError(f"`{name}` has no rows.")


def check_rows(
    dataset: Dataset | IterableDataset | None,
    name: str,
    text_field: str = "text",
    *,
    completion_only_loss: bool | None = None,
    assistant_only_loss: bool = False,
) -> None:
    """Check the columns of `dataset`, and every row of one that is in memory or on disk. Of a stream, only the first row is read.

    Raises:
        ValueError: if the dataset is missing or empty, has no columns to train on or masks that would not be read, or a row is
            malformed.
        TypeError: if it is no dataset.
    """
    check_present(dataset, name)
    columns = get_dataset_column_names(dataset)
    check_masks(columns, name, completion_only_loss=completion_only_loss, assistant_only_loss=assistant_only_loss)
    if "input_ids" in columns:
        return check_token_rows(dataset, name)
    if "messages" in columns or "conversations" in columns:
        wanted = ["messages" if "messages" in columns else "conversations"]
    elif "prompt" in columns and "completion" in columns:
        wanted = ["prompt", "completion"]
    elif text_field in columns:
        wanted = [text_field]
    else:
        raise ValueError(
            f"`{name}` has the columns {', '.join(columns) or '(none)'}, and nothing to train on. Give it 'messages', "
            f"'prompt' and 'completion', or {text_field!r} (`dataset_text_field` names another text column)."
        )
    for index, row in enumerate(_rows(dataset, wanted)):
        problem = _row_problem(row)
        if problem:
            raise ValueError(f"Row {index} of `{name}` is malformed: {problem}.")


def _rows(dataset: Dataset | IterableDataset, columns: list[str]) -> Iterator[dict]:
    if isinstance(dataset, IterableDataset):
        first = next(iter(dataset))
        yield {column: first.get(column) for column in columns}
        return
    for batch in dataset.select_columns(columns).iter(batch_size=1000):
        yield from (dict(zip(columns, values, strict=True)) for values in zip(*(batch[column] for column in columns), strict=True))


def _row_problem(row: dict) -> str | None:
    """What is wrong with the cells of a row that are trained on, or `None`."""
    for column, value in row.items():
        problem = _problem(value, column)
        if problem:
            return f"{column!r} {problem}"
    names = " and ".join(map(repr, row))
    if len({type(value) for value in row.values()}) > 1:
        return f"of {names}, one is a string and the other a list of messages"
    if not any(row.values()):
        column = list(row)[-1]
        return (
            f"{names} {'are' if len(row) > 1 else 'is'} empty, so that there is nothing to train on. Leave such rows out, as with "
            f"`dataset.filter(lambda row: row[{column!r}])`"
        )
    return None


def _problem(value, column: str) -> str | None:
    """What is wrong with one cell, or `None`."""
    if value is None:
        return "is missing"
    if isinstance(value, str):
        return "must be a list of messages, not a string" if column in ("messages", "conversations") else None
    if column not in CHAT_COLUMNS:
        return f"must be a string, not {type(value).__name__}"
    if not isinstance(value, list):
        return f"must be a string or a list of messages, not {type(value).__name__}"
    if not value:
        return "is an empty list"
    for position, message in enumerate(value):
        if not isinstance(message, dict):
            return f"has a message {position} that is no object with 'role' and 'content', but {message!r}"
        keys = {key for key, part in message.items() if part is not None}
        if not ({"role"} <= keys and keys & {"content", "tool_calls"}) and not {"from", "value"} <= keys:
            return f"has a message {position} without 'role' and 'content' (it has {', '.join(sorted(keys)) or 'nothing'})"
        content = next((message[key] for key in ("content", "value") if key in keys), "")
        problem = _content_problem(content, message.get("role"))
        if problem:
            return f"has a message {position} {problem}"
    if column in ("messages", "conversations") and not any(message[key] for message in value for key in message.keys() - {"role", "from"}):
        return "has no message with any content, so that there is nothing to train on"
    return None


def _content_problem(content, role: str | None) -> str | None:
    """What is wrong with the content of a message, or `None`.

    Chat templates leave out what they do not know without a word, text and all.
    """
    if isinstance(content, str) or isinstance(content, dict) and role == "tool":  # what a tool returned may be an object
        return None
    if not isinstance(content, list):
        return f"whose content is {reprlib.repr(content)}: write a string, or a list of parts such as {TEXT_PART}"
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind is None:
            return f"whose content has {reprlib.repr(part)} for a part, without a 'type': write {TEXT_PART}"
        if kind not in PART_TYPES:
            return f"whose content has a part of the type {kind!r}: write {TEXT_PART}, or one of the types {', '.join(PART_TYPES[1:])}"
        if kind == "text" and not isinstance(part.get("text"), str):
            return f"whose content has {reprlib.repr(part)} for a part, without a string as 'text': write {TEXT_PART}"
    return None


def check_prompts(dataset, name: str, *, owned_by_environment: bool = False) -> None:
    """Check the prompts of rows to generate from; a dictionary of datasets is checked one by one.

    Args:
        owned_by_environment: an environment makes the prompts, so rows need none.

    Raises:
        ValueError: if there are no rows or no prompts, or a row is malformed.
    """
    if isinstance(dataset, dict):
        for key, part in dataset.items():
            check_prompts(part, f"{name}[{key!r}]", owned_by_environment=owned_by_environment)
        return
    if not isinstance(dataset, Dataset) or owned_by_environment:
        return  # a stream is not read ahead, and TRL says what it thinks of anything else
    if len(dataset) == 0:
        raise ValueError(f"`{name}` has no rows.")
    if "prompt" not in dataset.column_names:
        raise ValueError(f"`{name}` has the columns {', '.join(dataset.column_names)}, but no 'prompt' to generate from.")
    for index, row in enumerate(_rows(dataset, ["prompt"])):
        problem = "is empty" if row["prompt"] == "" else _problem(row["prompt"], "prompt")
        if problem:
            raise ValueError(f"Row {index} of `{name}` is malformed: 'prompt' {problem}.")


def check_chat_template(dataset, name: str, processing_class, chat_template_path: str | None) -> None:
    """Raise `ValueError` for rows of messages when nothing says how to turn messages into text."""
    if chat_template_path is not None or getattr(processing_class, "chat_template", None) is not None:
        return
    first = next(iter(dataset), {})
    if "input_ids" not in first and any(isinstance(first.get(column), list) for column in CHAT_COLUMNS):
        raise ValueError(
            f"`{name}` holds messages, but the tokenizer has no chat template. Set `chat_template_path` to a Jinja file "
            "or to a model that has one, or give rows as text (`text`, or `prompt` and `completion` strings)."
        )


def check_chat_template_path(path: str | None) -> None:
    """Raise `ValueError` unless `path` is a Jinja file, or a folder or model id with a chat template."""
    if path is None or os.path.isfile(path) and path.endswith((".jinja", ".j2")):
        return
    try:
        AutoTokenizer.from_pretrained(path).get_chat_template()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"`chat_template_path={path!r}` is neither a file that ends in .jinja or .j2, nor a folder or model id with a tokenizer "
            f"that has a chat template. Write one of these. The loader said: {str(error).splitlines()[0]}"
        ) from None


def has_images(dataset: Dataset | IterableDataset | None) -> bool:
    """Whether rows carry images, by column name as TRL decides it."""
    columns = getattr(dataset, "column_names", None)
    if columns is None and dataset is not None:
        columns = next(iter(dataset), {}).keys()
    return any(column in (columns or ()) for column in IMAGE_COLUMNS)


def read_json_rows(path: str) -> Dataset:
    """A dataset from a local JSON-lines file (one object a line), or a JSON file with a list of objects.

    Raises:
        ValueError: if the file is missing or empty, or a line is no JSON object (naming the line).
    """
    if not os.path.isfile(path):
        raise ValueError(f"Data file {path!r} does not exist.")
    with open(path, encoding="utf-8") as file:
        text = file.read()
    if text.lstrip().startswith("["):
        try:
            rows = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {error.lineno}: not valid JSON ({error.msg}).") from None
    else:
        rows = [_parse_line(path, number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not rows:
        raise ValueError(f"Data file {path!r} has no rows.")
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}, row {number}: expected an object with named columns, got {row!r}.")
    try:
        return Dataset.from_list(rows)
    except (TypeError, ValueError) as error:  # Arrow's, whose columns have one type each
        kinds = {name: {type(row.get(name)).__name__ for row in rows} - {"NoneType"} for row in rows for name in row}
        mixed = "; ".join(f"{name!r} holds {' and '.join(sorted(found))}" for name, found in kinds.items() if len(found) > 1)
        raise ValueError(f"{path}: a column must hold values of one type. {mixed or error}.") from None


def _parse_line(path: str, number: int, line: str):
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {number}: not valid JSON ({error.msg}).") from None
