"""Render a user message and an answer prefix into the exact text a model reads, with the BOS it was trained on, once.

A text rendered here is final: it is tokenised with ``add_special_tokens=False``, because whatever special tokens belong
to it are already written in it. Scores moved by several points elsewhere because a template wrote one BOS and the
tokenizer added a second one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from .errors import InputError, IntegrityError

_PROBE = "word"


class PromptRenderer:
    """Render prompts for one tokenizer.

    Args:
        tokenizer: a transformers tokenizer (fast ones are counted in batches).
        chat: use the tokenizer's chat template; otherwise the raw text, as base models read it.
        thinking: for templates with a thinking switch: ``True`` opens the thinking block and drops the answer prefix
            (a prefix would close it), ``False`` closes it, ``None`` leaves the template's default. A prompt with an
            answer prefix never thinks, whatever the default: the prefix starts the answer.

    Attributes:
        switchable: the template has a thinking switch.

    Raises:
        InputError: chat without a template, or thinking asked of a model that cannot.
    """

    def __init__(self, tokenizer: Any, *, chat: bool, thinking: bool | None = None) -> None:
        template = getattr(tokenizer, "chat_template", None)
        if chat and not template:
            raise InputError("model.chat", chat, "this tokenizer has no chat template; set model.chat=false")
        switchable = "enable_thinking" in json.dumps(template) if chat else False
        if thinking and not switchable:
            why = "the chat template has no thinking switch" if chat else "thinking needs a chat template"
            raise InputError("model.thinking", thinking, f"null or false: {why}")
        self.tokenizer = tokenizer
        self.chat = chat
        self.thinking = thinking
        self.switchable = switchable
        self._switch = {"enable_thinking": thinking} if switchable and thinking is not None else {}
        self._backend: Any = getattr(tokenizer, "backend_tokenizer", None)
        self._bos: str = getattr(tokenizer, "bos_token", None) or ""
        self._wants_bos = self._tokenizer_adds_bos()
        self._fingerprint: str | None = None
        self.expected_leading_bos: int = self.leading_bos(self.encode(self.render(_PROBE, "")))

    def _tokenizer_adds_bos(self) -> bool:
        # Asked by behaviour: the attribute add_bos_token is absent or stale on many tokenizers.
        bos = getattr(self.tokenizer, "bos_token_id", None)
        return bos is not None and self.tokenizer(_PROBE).input_ids[:1] == [bos]

    @property
    def keeps_prefix(self) -> bool:
        """Whether the answer prefix is part of the prompt (not when the model thinks first)."""
        return self.thinking is not True

    def render(self, user: str, answer_prefix: str) -> str:
        """Return the prompt text.

        Args:
            user: the user's message; for a raw model, the text before the answer prefix.
            answer_prefix: what the answer starts with, without a leading space; "" for none.

        Returns:
            Text for ``tokenizer(text, add_special_tokens=False)``.

        Raises:
            IntegrityError: the chat template changed the answer prefix or dropped the message.
        """
        prefix = answer_prefix if self.keeps_prefix else ""
        text = self._chat(user, prefix) if self.chat else (f"{user} {prefix}" if prefix else user)
        return self._with_bos(text)

    def _chat(self, user: str, prefix: str) -> str:
        messages = [{"role": "user", "content": user}]
        if prefix:
            messages.append({"role": "assistant", "content": prefix})
        try:
            text = self.tokenizer.apply_chat_template(
                messages,
                tokenize=False,
                add_generation_prompt=not prefix,
                continue_final_message=bool(prefix),
                **self._switch,
            )
        except ValueError as error:
            raise IntegrityError(f"the chat template cannot continue {prefix!r}: {error}") from None
        # Templates may trim a message's ends, nothing else.
        if not text.endswith((prefix, prefix.rstrip())):
            raise IntegrityError(f"the chat template changed the answer prefix {prefix!r}: prompt ends {text[-80:]!r}")
        if user.strip() not in text:
            raise IntegrityError("the chat template changed the user's message")
        return text

    def _with_bos(self, text: str) -> str:
        if not self._wants_bos:
            return text
        while text.startswith(self._bos):
            text = text[len(self._bos) :]
        return self._bos + text

    def leading_bos(self, ids: Sequence[int]) -> int:
        """Return how many BOS ids the token ids start with."""
        bos = getattr(self.tokenizer, "bos_token_id", None)
        count = 0
        while bos is not None and count < len(ids) and ids[count] == bos:
            count += 1
        return count

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a rendered prompt."""
        # verbose=False: prompts beyond the tokenizer's own idea of a maximum are checked elsewhere.
        return list(self.tokenizer(text, add_special_tokens=False, verbose=False).input_ids)

    def count(self, text: str) -> int:
        """Return the number of tokens of a rendered prompt."""
        return len(self.encode(text))

    def count_batch(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text, special tokens not added."""
        if self._backend is None:
            return [self.count(text) for text in texts]
        self._forget_call_state()
        return [len(item) for item in self._backend.encode_batch(list(texts), add_special_tokens=False)]

    @property
    def splits_words(self) -> bool:
        """Whether no token can run across a space or a line break between two words.

        True for tokenizers with a pre-tokenizer that cuts there (all byte-level ones with a split pattern): token
        counts of word groups then add up. Asked by behaviour.
        """
        cutter = getattr(self._backend, "pre_tokenizer", None)
        if cutter is None:
            return False
        pieces = [piece for piece, _ in cutter.pre_tokenize_str("q w.\nz 7. v\n\nk")]
        return all(sum(letter in piece for letter in "qwz7vk") <= 1 for piece in pieces)

    def _forget_call_state(self) -> None:
        # The backend keeps truncation and padding from earlier calls; neither a count nor a fingerprint may see them.
        self._backend.no_truncation()
        self._backend.no_padding()

    @property
    def fingerprint(self) -> str:
        """SHA-256 over everything that decides the token ids: tokenizer, special tokens, template, chat, thinking."""
        if self._fingerprint is None:
            if self._backend is not None:
                self._forget_call_state()
                state = self._backend.to_str()
            else:
                vocabulary = json.dumps(self.tokenizer.get_vocab(), sort_keys=True)
                state = f"{type(self.tokenizer).__name__}\n{vocabulary}"
            parts = {
                "tokenizer": hashlib.sha256(state.encode()).hexdigest(),
                "special": {key: str(value) for key, value in self.tokenizer.special_tokens_map.items()},
                "adds_bos": self._wants_bos,
                "template": self.tokenizer.chat_template if self.chat else None,
                "chat": self.chat,
                "thinking": self.thinking,
            }
            self._fingerprint = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
        return self._fingerprint
