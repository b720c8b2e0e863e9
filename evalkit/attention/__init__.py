"""How a Hugging Face model's attention is replaced: registered functions, a paged cache and an explicit phase.

* :mod:`.interface`: the attention and mask functions registered with transformers under the name ``evalkit``,
* :mod:`.cache`: the paged KV cache,
* :mod:`.session`: one model under one method: prefill, decode, accounting.
"""

from .interface import ATTENTION_NAME
from .session import Session, check_supported

__all__ = ["ATTENTION_NAME", "Session", "check_supported"]
