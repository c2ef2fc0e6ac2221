"""YAML that somebody else may have written: plain values, written out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from cmsf.utils.errors import BadInput
from cmsf.utils.files import read_text
from cmsf.utils.text import first_line, is_encodable

_MOST = 1 << 20
_DEEPEST = 20


class _Plain(yaml.SafeLoader):
    """Without aliases, of which a few lines can stand for more than any memory holds, and of a bearable depth."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases are not taken; write it out", problem_mark=self._here())
        self.depth += 1
        if self.depth > _DEEPEST:
            raise yaml.MarkedYAMLError(problem=f"more than {_DEEPEST} levels deep", problem_mark=self._here())
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_scalar(self, node: Any) -> Any:
        value = super().construct_scalar(node)
        if isinstance(value, str) and not is_encodable(value):
            raise yaml.MarkedYAMLError(problem="half a letter", problem_mark=node.start_mark)
        return value

    def _here(self) -> Any:
        return self.peek_event().start_mark  # type: ignore[no-untyped-call]


def read_yaml(path: Path) -> tuple[Any, Any]:
    """The value of a file, and the node it was made from (None where it is empty); or BadInput."""
    return parse_yaml(read_text(path, _MOST), str(path))


def parse_yaml(text: str, origin: str) -> tuple[Any, Any]:
    loader = None
    try:
        loader = _Plain(text)
        node = loader.get_single_node()
        return (None if node is None else loader.construct_document(node)), node
    except yaml.MarkedYAMLError as error:
        line = "" if error.problem_mark is None else f" in line {error.problem_mark.line + 1}"
        raise BadInput(f"{origin} is no YAML: {str(error.problem)[:120]}{line}") from None
    # A date that is none, a number without digits, a truth that is neither: each fails in its own way.
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, ArithmeticError) as error:
        raise BadInput(f"{origin} is no YAML: {first_line(error)}") from None
    finally:
        if loader is not None:
            loader.dispose()
