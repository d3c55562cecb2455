"""What a key makes of its holder's requests: a Frontend around a Frontend, which knows nothing of keys.

The cache salt becomes one that only its namespace has, which joins and separates caches, homes and all that
is predicted of them; the tenant is the key's name, whatever the request says.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace

from kvhive.proto.limits import MAX_CACHE_NAME_CHARS
from kvhive.router.auth.cluster_secret import Namespaces
from kvhive.router.auth.principal import asking
from kvhive.router.field_checks import check_chars
from kvhive.router.frontend import GenerationEvent, ModelInfo, TokenizingFrontend, TokenPiece, Usage
from kvhive.router.request import GenerateRequest, Prompt


class KeyedFrontend:
    """Asks an inner Frontend in the name of whom the guard has let in. See Frontend."""

    def __init__(self, inner: TokenizingFrontend, namespaces: Namespaces) -> None:
        self._inner = inner
        self._namespaces = namespaces

    def models(self) -> list[ModelInfo]:
        """See Frontend."""
        return self._inner.models()

    def token_piece(self, token_id: int) -> TokenPiece:
        """See Frontend."""
        return self._inner.token_piece(token_id)

    def ready(self) -> bool:
        """See Frontend."""
        return self._inner.ready()

    async def tokenize(self, prompt: Prompt, model: str = "", cache_salt: str = "") -> list[int]:
        """See TokenizingFrontend."""
        own = self._own(GenerateRequest(prompt, cache_salt=cache_salt))
        return await self._inner.tokenize(prompt, model, own.cache_salt)

    async def detokenize(self, token_ids: Sequence[int], model: str = "") -> str:
        """See TokenizingFrontend."""
        return await self._inner.detokenize(token_ids, model)

    async def prewarm(self, request: GenerateRequest, workers: int) -> list[Usage]:
        """See TokenizingFrontend."""
        return await self._inner.prewarm(self._own(request), workers)

    def generate(self, request: GenerateRequest) -> AsyncGenerator[GenerationEvent, None]:
        """See Frontend. The generator is the inner one's: nothing stands between a token and its reader."""
        return self._inner.generate(self._own(request))

    def _own(self, request: GenerateRequest) -> GenerateRequest:
        """Return the request as its key's. Raises InvalidRequest for a salt that nobody may have."""
        principal = asking.get()
        if principal is None:  # a fault of ours, at which nobody's cache may be opened
            raise RuntimeError("a request came past the guard")
        check_chars("cache_salt", request.cache_salt, MAX_CACHE_NAME_CHARS)
        return replace(
            request,
            cache_salt=self._namespaces.salt(principal, request.cache_salt),
            tenant=principal.name,
            priority=min(request.priority, principal.max_priority),
        )
