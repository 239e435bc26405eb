"""Find what is wrong with rows that are tokens already: ids, labels and masks."""

import sys
from numbers import Integral

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset

MASKS = ("completion_mask", "assistant_masks")
COLUMNS = ("input_ids", "labels", *MASKS, "attention_mask")
BATCH_SIZE = 1000


def check_masks(columns, name: str, *, completion_only_loss: bool | None = None, assistant_only_loss: bool = False) -> None:
    """Raise `ValueError` for labels or masks that TRL would not read, and for a loss on a part of rows that nothing marks."""
    given = [column for column in ("labels", *MASKS) if column in columns]
    has_completions = "prompt" in columns and "completion" in columns
    if "input_ids" not in columns:
        if given:
            raise ValueError(
                f"`{name}` has the column {given[0]!r} but no 'input_ids', and is tokenised here: labels and masks of other tokens "
                "do not fit. Remove the column, or give the tokens as 'input_ids'."
            )
        if completion_only_loss and not has_completions:
            raise ValueError(
                f"`completion_only_loss=True`, but `{name}` has no 'prompt' and 'completion': every token would be trained on. Give "
                "these two columns, or leave `completion_only_loss` out."
            )
        return
    if "labels" in given:
        if given != ["labels"]:
            raise ValueError(
                f"`{name}` has 'labels', so that {given[1]!r} would not be read. Remove one of the two columns: labels already say "
                "which tokens are trained on (those that are not -100)."
            )
        return
    fields = {"completion_only_loss": completion_only_loss, "assistant_only_loss": assistant_only_loss}
    for (field, asked), mask in zip(fields.items(), MASKS, strict=True):
        if asked and mask not in given:
            raise ValueError(
                f"`{field}=True`, but the tokens of `{name}` have no {mask!r}: every one would be trained on. Add that column, or "
                f"'labels' with -100 where a token is not to be learned, or leave `{field}` out."
            )
    if "completion_mask" in given and completion_only_loss is None and not has_completions:
        raise ValueError(
            f"`{name}` has a 'completion_mask', which is not read unless it is asked for. Write `completion_only_loss=True` to train "
            "on the marked tokens, or False to train on all."
        )


def check_token_rows(dataset: Dataset | IterableDataset, name: str, vocabulary: int | None = None) -> None:
    """Check every row of tokens in memory or on disk, or the first one of a stream.

    Args:
        vocabulary: the number of tokens that the model knows, once that is known.

    Raises:
        ValueError: naming the row.
    """
    if isinstance(dataset, IterableDataset):
        first = next(iter(dataset))
        return _raise_for_row({column: first[column] for column in COLUMNS if column in first}, 0, name, vocabulary)
    rows = dataset.select_columns([column for column in COLUMNS if column in dataset.column_names])
    start = 0
    for batch in rows.with_format("arrow").iter(batch_size=BATCH_SIZE):
        if not _is_good(batch, vocabulary):  # only then are rows looked at one by one
            for offset, row in enumerate(rows.with_format(None).select(range(start, start + len(batch)))):
                _raise_for_row(row, start + offset, name, vocabulary)
        start += len(batch)


def _is_good(batch: pa.Table, vocabulary: int | None) -> bool:
    lengths = None
    for column in batch.column_names:
        lists = batch[column]
        if not (pa.types.is_list(lists.type) or pa.types.is_large_list(lists.type) or pa.types.is_fixed_size_list(lists.type)):
            return False
        of = lists.type.value_type
        if not (pa.types.is_integer(of) or column in MASKS and pa.types.is_boolean(of)):
            return False
        values = pc.list_flatten(lists)
        if lists.null_count or values.null_count:
            return False
        own_lengths = pc.list_value_length(lists)
        lengths = own_lengths if lengths is None else lengths
        if pc.min(own_lengths).as_py() == 0 or not pc.all(pc.equal(own_lengths, lengths)).as_py():
            return False
        if _is_wrong(values.to_numpy(), column, vocabulary).any():
            return False
    return True


def _raise_for_row(row: dict, index: int, name: str, vocabulary: int | None) -> None:
    problem = _problem(row, vocabulary)
    if problem:
        raise ValueError(f"Row {index} of `{name}` is malformed: {problem}.")


def _problem(row: dict, vocabulary: int | None) -> str | None:
    """What is wrong with one row, or `None`. Its first column is `input_ids`."""
    count = None
    for column, values in row.items():
        values = values.tolist() if hasattr(values, "tolist") else values  # a stream may yield arrays
        if values is None:
            return f"{column!r} is missing"
        if not isinstance(values, (list, tuple)):
            return f"{column!r} must be a list with one whole number for each token, not {values!r}"
        odd = [v for v in values if not isinstance(v, Integral) or isinstance(v, bool) and column not in MASKS]
        if odd:
            return f"{column!r} must hold whole numbers, not {odd[0]!r}"
        if not values:
            return f"{column!r} is empty"
        count = len(values) if count is None else count
        if len(values) != count:
            return f"{column!r} has {len(values)} numbers for the {count} tokens of 'input_ids'"
        wrong = np.flatnonzero(_is_wrong(np.array(values), column, vocabulary))
        if len(wrong):
            return f"{column!r} has {values[wrong[0]]} at position {wrong[0]}: {_expected(column, vocabulary)}"
    return None


def _is_wrong(values: np.ndarray, column: str, vocabulary: int | None) -> np.ndarray:
    if column == "attention_mask":
        return values != 1
    if column in MASKS:
        return (values != 0) & (values != 1)
    outside = (values < 0) | (values >= (vocabulary or sys.maxsize))
    return outside & (values != -100) if column == "labels" else outside


def _expected(column: str, vocabulary: int | None) -> str:
    if column == "attention_mask":
        return "this column is not read, and every token would be trained on. Leave padding out of the rows"
    if column in MASKS:
        return "write 1 for tokens to train on and 0 for others"
    known = f"the model's tokens are 0 to {vocabulary - 1}" if vocabulary else "tokens are numbered from 0"
    return known + (", and -100 stands for a token that is not trained on" if column == "labels" else "")
