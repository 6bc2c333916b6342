"""The pooling half of the offline class: encode, embed, classify, score."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from quire.engine.client import EngineInfo
from quire.foundation.errors import InputError
from quire.frontend.inputs import PromptLike, as_list, read_prompt
from quire.frontend.outputs import RequestState
from quire.frontend.pooling import requests as pooling
from quire.frontend.pooling.prompts import Pair, PairEncoder, pair_template
from quire.frontend.pooling.requests import PoolingPrompt, pooler_of
from quire.frontend.pooling.similarity import sides, similarity, task_of
from quire.frontend.progress import ProgressFactory
from quire.frontend.templates.chat import ChatTemplate
from quire.frontend.tokenization.tokenizer import Tokenizer
from quire.frontend.tokenization.truncation import (
    Side,
    TokenizationOptions,
    Truncation,
    check_least_tokens,
    encode_texts,
)
from quire.types.adapter import Adapter, LoRARequest
from quire.types.pooling import (
    CLASSIFY,
    EMBED,
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingParams,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.types.request import EngineRequest

Prompts = PromptLike | Sequence[PromptLike]
Params = PoolingParams | Sequence[PoolingParams]
Adapted = LoRARequest | Sequence[LoRARequest | None] | None
T = TypeVar("T")


class PoolingAPI:
    """For a class that runs requests. All raise InputError for what cannot run, before anything runs.

    truncate_prompt_tokens: cut longer prompts, -1 to the context; truncation_side: where, right unless it is given.
    lora_request: an adapter for all prompts, or a list with one, or None, for each.
    tokenization_kwargs: the same two, and add_special_tokens, under the name that other engines have for them.
    """

    @property
    @abstractmethod
    def info(self) -> EngineInfo: ...

    @abstractmethod
    def get_tokenizer(self) -> Tokenizer: ...

    @abstractmethod
    def _run_requests(
        self, requests: Mapping[str, list[EngineRequest]], texts: Sequence[str | None], use_tqdm: bool | ProgressFactory
    ) -> list[RequestState]: ...

    @abstractmethod
    def _adapters(self, lora_request: Adapted, prompts: Sequence[Any]) -> list[Adapter | None]: ...

    @abstractmethod
    def _new_number(self) -> str: ...

    def encode(
        self,
        prompts: Prompts,
        pooling_params: Params | None = None,
        *,
        pooling_task: str | None = None,
        use_tqdm: bool | ProgressFactory = True,
        lora_request: Adapted = None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Side | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """The vector of each prompt (of tasks by token: the vectors of its tokens), in the order of the prompts."""
        given = [read_prompt(prompt) for prompt in as_list(prompts)]
        options = TokenizationOptions.of(tokenization_kwargs, truncate_prompt_tokens, truncation_side)
        cut = self._cut(options)
        texts = [prompt.text or "" for prompt in given if prompt.token_ids is None]
        special = options.special(True)
        if texts and cut.limit is None:
            context = self.info.max_model_len
            check_least_tokens(self.get_tokenizer(), texts, context, context)
        encoded = iter(encode_texts(self.get_tokenizer(), texts, cut, add_special_tokens=special) if texts else ())
        ready = [
            PoolingPrompt(cut.cut(p.token_ids) if p.token_ids is not None else next(encoded), None, p.cache_salt)
            for p in given
        ]
        return self._pool(ready, pooling_params, pooling_task, use_tqdm, lora_request)

    def embed(
        self,
        prompts: Prompts,
        *,
        pooling_params: Params | None = None,
        use_tqdm: bool | ProgressFactory = True,
        lora_request: Adapted = None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Side | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[EmbeddingRequestOutput]:
        outputs = self.encode(
            prompts,
            pooling_params,
            pooling_task=EMBED,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            truncate_prompt_tokens=truncate_prompt_tokens,
            truncation_side=truncation_side,
            tokenization_kwargs=tokenization_kwargs,
        )
        return [_with(output, EmbeddingOutput(output.outputs.data.tolist())) for output in outputs]

    def classify(
        self,
        prompts: Prompts,
        *,
        pooling_params: Params | None = None,
        use_tqdm: bool | ProgressFactory = True,
        lora_request: Adapted = None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Side | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
    ) -> list[ClassificationRequestOutput]:
        outputs = self.encode(
            prompts,
            pooling_params,
            pooling_task=CLASSIFY,
            use_tqdm=use_tqdm,
            lora_request=lora_request,
            truncate_prompt_tokens=truncate_prompt_tokens,
            truncation_side=truncation_side,
            tokenization_kwargs=tokenization_kwargs,
        )
        return [_with(output, ClassificationOutput(output.outputs.data.tolist())) for output in outputs]

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool | ProgressFactory = True,
        lora_request: Adapted = None,
        truncate_prompt_tokens: int | None = None,
        truncation_side: Side | None = None,
        tokenization_kwargs: Mapping[str, Any] | None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """How well texts fit each other.

        A cross-encoder (a classifier with one class) reads both together; embeddings are compared, by the cosine or as
        the model's files say. Those of tokens (ColBERT) are compared one by one: `data_1` has the queries.

        Args:
            data_1: one text, or as many as `data_2` has.
            data_2: texts, or one.
            pooling_params: one for all pairs; None: the model's defaults.
            use_tqdm: show progress.
            lora_request: the adapter that the texts are read with.
            truncate_prompt_tokens: longer prompts are cut to this; -1: to the context.
            truncation_side: where they are cut: "left" or "right".
            tokenization_kwargs: the two above, under the name that other engines have for them.
            chat_template: another template for pairs than the model's.

        Returns:
            The scores, in the order of `data_2`.

        Raises:
            InputError: the model makes no scores, or a text cannot run.
        """
        pairs = pair_up(data_1, data_2)
        options = TokenizationOptions.of(tokenization_kwargs, truncate_prompt_tokens, truncation_side)
        if options.add_special_tokens is False:
            raise InputError("scores need the special tokens that stand around a pair", "add_special_tokens")
        cut = self._cut(options)
        params = pooling_params or PoolingParams()
        if pooler_of(self.info).kind == EMBED:
            return self._compare(pairs, params, cut, use_tqdm, lora_request)
        check_cross_encoder(self.info)
        tokenizer = self.get_tokenizer()
        template = pair_template(tokenizer, self.info)
        if chat_template is not None:
            template = ChatTemplate(chat_template, tokenizer.special_tokens)
        prompts = PairEncoder(tokenizer, cut, template=template).encode(pairs)
        outputs = self._pool(prompts, params, CLASSIFY, use_tqdm, lora_request)
        return [_with(output, ScoringOutput(float(output.outputs.data[0]))) for output in outputs]

    def _compare(
        self,
        pairs: Sequence[Pair],
        params: PoolingParams,
        cut: Truncation,
        use_tqdm: bool | ProgressFactory,
        lora_request: Adapted,
    ) -> list[ScoringRequestOutput]:
        """By embeddings: each text is embedded once, however many pairs it is in."""
        pooler, tokenizer = pooler_of(self.info), self.get_tokenizer()
        texts, prompts = [], []
        framing = sides(self.info, tokenizer)
        for number, side in enumerate(framing):
            found = list(dict.fromkeys(pair[number] for pair in pairs))
            texts += [(number, text) for text in found]
            prompts += [side.prompt(ids) for ids in encode_texts(tokenizer, found, side.cut(cut))]
        outputs = self._pool(prompts, params, task_of(pooler), use_tqdm, lora_request)
        by_text = dict(zip(texts, outputs, strict=True))
        made = []
        for query, document in pairs:
            both = by_text[0, query], by_text[1, document]
            vectors = (side.counted(output) for side, output in zip(framing, both, strict=True))
            ids = both[0].prompt_token_ids + both[1].prompt_token_ids
            made.append(_with(both[1], ScoringOutput(similarity(pooler, *vectors)), ids))
        return made

    def _cut(self, options: TokenizationOptions) -> Truncation:
        return Truncation.of(options.truncate_prompt_tokens, options.truncation_side, self.info)

    def _pool(
        self,
        prompts: Sequence[PoolingPrompt],
        params: Params | None,
        task: str | None,
        use_tqdm: bool | ProgressFactory,
        lora_request: Adapted = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        chosen: Sequence[PoolingParams] = (
            params if isinstance(params, Sequence) else [params or PoolingParams()] * len(prompts)
        )
        if len(chosen) != len(prompts):
            raise InputError(f"pooling_params has {len(chosen)} entries for {len(prompts)} prompts", "pooling_params")
        for one in chosen:
            if not isinstance(one, PoolingParams):
                raise InputError(f"pooling_params must be PoolingParams, got {type(one).__name__}", "pooling_params")
            if task is not None and one.task not in (None, task):
                raise InputError(f"pooling_params.task is {one.task!r}, and {task!r} is asked for", "pooling_params")
        tasks = [pooling.check_task(one, self.info, task) for one in chosen]
        adapters = self._adapters(lora_request, prompts)
        requests = {}
        for prompt, one, its_task, adapter in zip(prompts, chosen, tasks, adapters, strict=True):
            number = self._new_number()
            requests[number] = [pooling.build(prompt, one, its_task, self.info, request_id=number, adapter=adapter)]
        request_states = self._run_requests(requests, [None] * len(requests), use_tqdm)
        return [
            pooling.output(request_state, its_task, one, self.info)
            for request_state, its_task, one in zip(request_states, tasks, chosen, strict=True)
        ]


def pair_up(first: str | Sequence[str], second: str | Sequence[str]) -> list[tuple[str, str]]:
    """1 and N texts or N and N → pairs. Raises InputError for other numbers, or what is no text."""
    one, many = ([x] if isinstance(x, str) else list(x) for x in (first, second))
    for texts in (one, many):
        if not texts or not all(isinstance(text, str) for text in texts):
            raise InputError("a score needs texts: strings or non-empty lists of strings", "data")
    if len(one) == 1:
        one = one * len(many)
    if len(one) != len(many):
        raise InputError(f"a score needs 1 text and N texts, or N and N, got {len(one)} and {len(many)}", "data")
    return list(zip(one, many, strict=True))


def check_cross_encoder(info: EngineInfo) -> None:
    """Raises InputError if the model's classes are no single score."""
    pooler = pooler_of(info)
    if pooler.size != 1 or pooler.only_by_token:
        raise InputError(
            f"a score needs an embedding model or a classifier with one class, and {info.resolved.info.architecture} "
            f"has {pooler.size} classes",
            "model",
        )


def _with(output: PoolingRequestOutput[Any], outputs: T, ids: list[int] | None = None) -> PoolingRequestOutput[T]:
    return PoolingRequestOutput(
        output.request_id, outputs, output.prompt_token_ids if ids is None else ids, output.num_cached_tokens
    )
