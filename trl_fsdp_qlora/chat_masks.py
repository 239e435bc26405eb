"""Assistant-only loss for chat templates without `{% generation %}` markers, such as Gemma 4's.

A template says what the model writes even where it does not mark it: rendered up to the generation prompt, a conversation ends where the
model takes over; rendered with the answer, it ends where the model stops. Compared with the rendering of the whole row, this gives the
exact text of every assistant message, or an error: a template that rewrites earlier turns has no exact mask. The text ends with the
special token that closes the message (`<turn|>`, or `<|tool_response>` behind a Gemma 4 tool call), which is how the model stops.
"""

import copy
import functools
import json
from bisect import bisect_left, bisect_right
from os.path import commonprefix

from datasets import Dataset, IterableDataset
from transformers import PreTrainedTokenizerBase, ProcessorMixin
from trl.chat_template_utils import get_training_chat_template, has_generation_markers
from trl.data_utils import common_prefix_length, maybe_convert_to_chatml, prepare_multimodal_messages

from .logging import get_logger

Rows = Dataset | IterableDataset
Processing = PreTrainedTokenizerBase | ProcessorMixin
TEXT_COLUMNS = ("messages", "conversations", "prompt", "completion", "tools", "chat_template_kwargs")
INSTEAD = "Write `prompt`/`completion` rows with one model turn per completion, or set a chat template with {% generation %} markers."
warn_once = functools.cache(get_logger(__name__).warning)


def needs_rendered_masks(processing_class: Processing) -> bool:
    """Whether TRL cannot mask: the template has no markers and TRL no marked version of it. `ValueError` if there is no template."""
    if processing_class.chat_template is None:
        raise ValueError(f"{type(processing_class).__name__} has no chat template to find assistant turns with. Set `chat_template_path`.")
    if has_generation_markers(processing_class.chat_template):
        return False
    try:
        return get_training_chat_template(processing_class) is None
    except Exception:  # a `ValueError` is how TRL says that it has none; its probes may also fail inside templates and image processors
        return True


def add_assistant_masks(
    dataset: Rows, processing_class: Processing, *, completion_only: bool = True, num_proc: int | None = None, desc: str | None = None
) -> Rows:
    """Tokenise conversations as TRL does and say which tokens the model has to produce.

    Rows have `messages` (or `conversations`, from/value style too), or `prompt` and `completion` messages; `tools` and
    `chat_template_kwargs` do what they do in TRL. In place of these columns come lists of one length per row: `input_ids` (exactly those
    of `apply_chat_template`), `assistant_masks` (0 or 1) and, where there is a prompt, TRL's `completion_mask`. A dataset that already has
    `input_ids` with `assistant_masks` or `labels` comes back as it is.

    A token that begins in the generation prompt does not count if it takes only white space from the model's text (an answer that opens
    with a line break); if it takes more, the row is refused.

    Args:
        completion_only: leave the prompt's assistant messages out of `assistant_masks`, so that history may be rewritten. `False`, for
            `completion_only_loss=False`, asks for every assistant message.
        num_proc, desc: as in `Dataset.map`; an `IterableDataset` has no use for them.

    Raises:
        ValueError: naming the row, if it is malformed or what the model writes in it cannot be proven. Also for a dataset without rows
            or conversations, with images, or tokenised without masks, and for a slow tokenizer.
    """
    if not isinstance(dataset, Rows):
        raise ValueError(f"Expected a `Dataset` or `IterableDataset`, got {type(dataset).__name__}. Pass its splits one by one.")
    columns = set(next(iter(dataset), ()))
    if "input_ids" in columns and columns & {"assistant_masks", "labels"}:
        return dataset
    conversational = columns & {"messages", "conversations"} or columns >= {"prompt", "completion"}
    if not conversational or columns & {"input_ids", "image", "images"}:
        have = f"the columns {sorted(columns)}" if columns else "no rows"
        raise ValueError(f"Rendered assistant masks need text `messages`, or `prompt` and `completion` messages; the dataset has {have}.")
    tokenizer = getattr(processing_class, "tokenizer", processing_class)
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ValueError(f"{type(tokenizer).__name__} gives no character offsets. Load a fast tokenizer.")
    backend = copy.deepcopy(tokenizer.backend_tokenizer)
    backend.post_processor = None  # adds nothing to chats, but a byte-level one may trim white space from the offsets
    backend.no_padding()
    backend.no_truncation()
    closers = {index: token for token, index in tokenizer.get_added_vocab().items() if not token.isspace()}
    return dataset.map(
        _process_row,
        with_indices=True,
        fn_kwargs={"processing_class": processing_class, "encoder": (backend, closers), "completion_only": completion_only},
        remove_columns=[column for column in TEXT_COLUMNS if column in columns],
        **({"num_proc": num_proc, "desc": desc} if isinstance(dataset, Dataset) else {}),
    )


def _process_row(example, row: int, processing_class, encoder: tuple, completion_only: bool) -> dict[str, list[int]]:
    try:
        return _tokenize_and_mask(maybe_convert_to_chatml(dict(example)), processing_class, encoder, completion_only)
    except ValueError as error:
        raise ValueError(f"Row {row}: {error}") from error


def _tokenize_and_mask(example: dict, processing_class, encoder: tuple, completion_only: bool) -> dict[str, list[int]]:
    is_processor = isinstance(processing_class, ProcessorMixin)
    columns = ("prompt", "completion") if "prompt" in example else ("messages",)
    parts = [_checked_messages(example.get(column), column) for column in columns]
    messages = sum(parts, [])
    tools = json.loads(example["tools"]) if isinstance(example.get("tools"), str) else example.get("tools")
    template_kwargs = {"tools": tools, **(example.get("chat_template_kwargs") or {})}

    def render(messages: list[dict], tokenize: bool = False, **kwargs) -> str | list[int]:
        try:
            messages = prepare_multimodal_messages(messages) if is_processor else messages
            out = processing_class.apply_chat_template(messages, tokenize=tokenize, return_dict=tokenize, **template_kwargs, **kwargs)
        except Exception as error:  # templates raise whatever they like
            raise ValueError(f"the chat template cannot render {len(messages)} messages: {type(error).__name__}: {error}") from error
        return out if not tokenize else out["input_ids"][0] if is_processor else out["input_ids"]

    row = _Rendering(render, messages, *encoder)
    if row.ids != list(render(messages, tokenize=True)):
        raise ValueError(f"the rendered text and `apply_chat_template` give different tokens. {INSTEAD}")
    mask = [0] * len(row.ids)
    for i in range(len(parts[0]) if completion_only and len(parts) == 2 else 0, len(messages)):
        try:
            for before, after in _stretches(messages, i) if messages[i]["role"] == "assistant" else ():
                tokens = row.tokens(row.start(before), row.end(after))
                if not tokens or any(mask[tokens.start :]):
                    raise ValueError(f"the chat template leaves it no text of its own. {INSTEAD}")
                mask[tokens.start : tokens.stop] = [1] * len(tokens)
        except ValueError as error:
            raise ValueError(f"message {i} (assistant): {error}") from error
    if not any(mask):
        raise ValueError(f"no 'assistant' message to learn from in `{columns[-1]}`, the roles: {sorted({m['role'] for m in messages})}.")
    if len(parts) == 1:
        return {"input_ids": row.ids, "assistant_masks": mask}
    length = common_prefix_length(render(parts[0], tokenize=True, add_generation_prompt=True), row.ids)
    return {"input_ids": row.ids, "assistant_masks": mask, "completion_mask": [0] * length + [1] * (len(mask) - length)}


class _Rendering:
    """A row as text and tokens, and where in the text, counted in characters, the model begins and stops."""

    def __init__(self, render, messages: list[dict], backend, closers: dict[int, str]):
        self.render, self.closers, self.text = render, closers, render(messages)
        encoding = backend.encode(self.text, add_special_tokens=False)
        self.ids, self.starts, self.ends = encoding.ids, [start for start, _ in encoding.offsets], [end for _, end in encoding.offsets]

    def start(self, before: list[dict]) -> int:
        """Where the model takes over after the messages `before`: at the end of the generation prompt. Some templates write more there than
        in whole conversations (Gemma 4 31B: an empty thought); then where the header ends, which is all that two probes share."""
        prompt = self.render(before, add_generation_prompt=True)
        if self.text.startswith(prompt):
            return len(prompt)
        header = commonprefix([self.render([*before, {"role": "assistant", "content": probe}]) for probe in "01"])
        if not (self.text.startswith(header) and prompt.startswith(header)):
            raise ValueError(f"the generation prompt before it is not in the whole row: {self.difference(prompt)}. {INSTEAD}")
        warn_once(f"Generation prompts end in {prompt[len(header) :]!r}, which the chat template leaves out of the rows to train on.")
        return len(header)

    def end(self, after: list[dict]) -> int:
        """Where the model stops in the last message of `after`: behind the special token that closes it. What differs between a
        conversation that ends here and one that goes on to another answer is not part of the message."""
        closed, goes_on = self.render(after), self.render(after, add_generation_prompt=True)
        own = closed if goes_on.startswith(closed) else commonprefix([closed, goes_on])
        if not self.text.startswith(own):
            raise ValueError(f"the chat template changes it when later messages follow: {self.difference(own)}. {INSTEAD}")
        last = range(bisect_right(self.ends, len(own)) - 1, -1, -1)
        end = next((self.ends[k] for k in last if self.ids[k] in self.closers), 0)
        rest = own[end:].lstrip()  # nothing, or how the next token begins in either case
        if not any(token.startswith(rest) for token in self.closers.values()):
            raise ValueError(f"no special token closes it, so the model would never learn to stop after {rest[-40:]!r}. {INSTEAD}")
        return end

    def tokens(self, start: int, end: int) -> range:
        """The tokens of the text from `start` to `end`, where a token ends."""
        first = bisect_left(self.starts, start)
        if first and self.text[start : self.ends[first - 1]].strip():
            token = self.text[self.starts[first - 1] : self.ends[first - 1]]
            raise ValueError(f"the token {token!r} is half generation prompt and half the model's text. {INSTEAD}")
        return range(first, bisect_left(self.starts, end))

    def difference(self, rendered: str) -> str:
        at = len(commonprefix([rendered, self.text]))
        return f"{rendered[at : at + 40]!r} has become {self.text[at : at + 40]!r} at character {at}"


def _stretches(messages: list[dict], i: int) -> list[tuple[list[dict], list[dict]]]:
    """The messages before and after each stretch of text that the model writes for message `i`: one, or two where `tool_responses` inside
    the message (Gemma's own style) stand between its calls and its content."""
    before, message = messages[:i], messages[i]
    if not message.get("tool_responses"):
        return [(before, messages[: i + 1])]
    answered = {**message, "content": ""}
    called = {key: value for key, value in answered.items() if key != "tool_responses"}
    content = message.get("content") or ""
    text = content if isinstance(content, str) else "".join(part["text"] for part in content)
    return [(before, [*before, called]), ([*before, answered], messages[: i + 1])][: 2 if text.strip() else 1]


def _checked_messages(messages, column: str) -> list[dict]:
    for i, message in enumerate(messages if isinstance(messages, list) and messages else [messages]):
        role, content = (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
        parts = content if isinstance(content, list) else [{"text": content or ("" if role == "assistant" else content)}]
        if not isinstance(role, str) or not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts):
            raise ValueError(f"`{column}[{i}]` is {message!r}, expected a message with `role` and text `content`.")
    return messages
