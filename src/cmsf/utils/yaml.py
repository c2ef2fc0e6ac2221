"""Safe reading of YAML that somebody else may have written: plain values, no aliases, limited depth."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from cmsf.utils.errors import BadInput
from cmsf.utils.files import read_text
from cmsf.utils.text import error_message, is_encodable

_MAX_BYTES = 1 << 20
_MAX_DEPTH = 20


class _PlainLoader(yaml.SafeLoader):
    """A safe loader without aliases, a few lines of which can expand beyond any memory, and of limited depth."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(
                problem="aliases are not supported; write the value out", problem_mark=self._here()
            )
        self.depth += 1
        if self.depth > _MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"more than {_MAX_DEPTH} levels deep", problem_mark=self._here())
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        if isinstance(value, str) and not is_encodable(value):
            raise yaml.MarkedYAMLError(problem="a lone surrogate", problem_mark=node.start_mark)
        return value

    def _here(self) -> Any:
        return self.peek_event().start_mark  # type: ignore[no-untyped-call]


def read_yaml(path: Path) -> tuple[Any, Any]:
    """Returns the value of a file and the node it was built from (None if it is empty), or raises BadInput."""
    return parse_yaml(read_text(path, _MAX_BYTES), str(path))


def parse_yaml(text: str, origin: str) -> tuple[Any, Any]:
    loader = None
    try:
        loader = _PlainLoader(text)
        node = loader.get_single_node()
        return (None if node is None else loader.construct_document(node)), node
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise BadInput(f"{origin} is not valid YAML: {str(error.problem)[:120]}{line}") from None
    # An impossible date, a number without digits, a boolean that is neither: each fails in its own way.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        raise BadInput(f"{origin} is not valid YAML: {error_message(error)}") from None
    finally:
        if loader is not None:
            loader.dispose()
