"""Documents from a function of the user, as texts or as tokens."""

import inspect
import itertools
import json
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from titan_async.data.readers import Position, is_validation
from titan_async.data.text_source import TextSource
from titan_async.errors import UserError

__all__ = ["FunctionReader"]

_END = object()


class FunctionReader:
    """Documents of the iterable that a function returns, in its order.

    The function is called for each epoch. It is given those of the arguments ``epoch`` (from 0), ``split``
    ("train" or "validation"), ``rank`` and ``world_size`` for which it has parameters. The latter two are the
    share of a data-parallel rank, or of one of its worker processes. If the function takes the split, or the
    share, all its documents belong to it; otherwise they are selected here.

    A position is [documents read, those of them in the split, state]. The state is that of the ``state_dict``
    of the iterable or its iterator. Without one, a resumed run reads the documents again and skips them.
    """

    def __init__(self, source: TextSource, rank: int, world_size: int) -> None:
        assert source.function is not None
        self._source, self._function = source, source.function
        self._rank, self._world_size = rank, world_size
        self._takes = inspect.signature(source.function).parameters.keys()

    def read(self, epoch: int, position: Position) -> Iterator[tuple[Any, Position]]:
        source, rank, world_size = self._source, self._rank, self._world_size
        values = {"epoch": epoch, "split": source.split, "rank": rank, "world_size": world_size}
        done, kept, state = position or (0, 0, None)
        documents = self._call(self._function, **{k: v for k, v in values.items() if k in self._takes})
        if not hasattr(documents, "__iter__"):
            raise UserError(
                f"{source.shown} returns a {type(documents).__name__}: return an iterable of documents"
            )
        if state is not None and hasattr(documents, "load_state_dict"):
            self._call(documents.load_state_dict, state)
        iterator = self._call(iter, documents)
        stateful = next((each for each in (iterator, documents) if hasattr(each, "state_dict")), None)
        if state is None:
            for _ in range(done):
                self._call(next, iterator, _END)
        elif not hasattr(documents, "load_state_dict"):
            self._call(iterator.load_state_dict, state)
        for index in itertools.count(done):
            document = self._call(next, iterator, _END)
            if document is _END:
                if index == 0:
                    raise UserError(
                        f"{source.shown} yields no document in epoch {epoch} for {source.split}, share "
                        f"{rank} of {world_size}: yield more, and return a new iterable at each call"
                    )
                return
            is_in_split = is_validation(index, source.validation_fraction) == (source.split == "validation")
            if "split" not in self._takes and not is_in_split:
                continue
            kept += 1
            if "rank" not in self._takes and (kept - 1) % world_size != rank:
                continue
            checked = self._checked(document, index)
            if len(checked):
                yield checked, [index + 1, kept, self._state_of(stateful)]

    def _call(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Calls the user's code; an exception becomes a `UserError`."""
        try:
            return function(*args, **kwargs)
        except UserError:
            raise
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            raise UserError(
                f"{self._source.shown} failed: {type(error).__name__}: {' '.join(str(error).split())} "
                f"({frame.filename}:{frame.lineno}); fix it, or call it in Python for a traceback"
            ) from error

    def _checked(self, document: object, index: int) -> Any:
        if isinstance(document, str):
            return document.strip() and document
        tokens = np.asarray(document)
        if tokens.ndim == 1 and (tokens.dtype.kind in "iu" or not tokens.size):
            return tokens.astype(np.int64)
        raise UserError(
            f"document {index} of {self._source.shown} is a {type(document).__name__}: yield texts (str), or "
            "the tokens of each document as a list or an array of integers"
        )

    def _state_of(self, stateful: Any) -> Any:
        if stateful is None:
            return None
        state = self._call(stateful.state_dict)
        try:
            return json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"state_dict() of {self._source.shown} has values other than numbers, strings, lists and "
                f"dictionaries ({error}): remove these values, or remove state_dict"
            ) from error
