"""Reads the arguments of one call: namespaced tags in, pieces of one JSON object out.

Rules beyond well-formed tags, each for something that deployed checkpoints or odd values do:

- A text value ends only at its own closing tag: whatever else it holds, markers included, is text.
- A value without an opening tag, or with one that lost its `<`, takes its name from the closing tag.
- A closing tag of an enclosing element closes what is open inside it.
- Equal tags in a row are one array.
- Text in a call that no tag claims is left over: it is content, which comes after the call.
"""

from __future__ import annotations

from enum import Enum, auto

from sglang_m3.parsing.element import Body, Element
from sglang_m3.parsing.events import CallArguments
from sglang_m3.parsing.markup import (
    BLOCK,
    INVOKE,
    MORE,
    NAMESPACE,
    NAMESPACES,
    NO,
    WHITESPACE,
    Buffer,
    Tag,
    match_close,
    match_invoke,
    match_tag,
    without_begun_tag,
)
from sglang_m3.parsing.schema import Schema, Value, dump, quote

MAX_DEPTH = 96
"""Elements inside each other; markup below that is text. JSON readers have limits, too."""


class Progress(Enum):
    MORE = auto()
    """The call goes on."""
    CALL_ENDED = auto()
    BLOCK_ENDED = auto()
    """The call and its block ended."""
    NEXT_CALL = auto()
    """The call ended because another opens at the buffer's position."""


class ArgumentReader:
    """The arguments of the call `index`, whose function's parameters `schema` describes.

    `read` consumes what it can of the buffer and appends events to `out`; it holds back at most a marker.
    Where the reply ends inside the call, `cut_off` writes what there is of an argument not yet written.
    An argument that may come again, as an array's tag does, is written when another argument begins. One that
    comes again later is written again at the end with all its values: readers of JSON keep the last of equal
    names.
    """

    def __init__(self, index: int, schema: Schema) -> None:
        self.out: list[CallArguments] = []
        self.left_over: list[str] = []
        """Text that no tag claimed. Clients put a call together from neighbouring events, so it waits."""
        self._index = index
        self._elements = [Element(INVOKE, schema, Body.CHILDREN)]
        self._written: set[str] = set()
        self._again: dict[str, None] = {}
        self._values: dict[str, list[Value]] = {}
        self._waiting: str | None = None
        """The argument that may still grow; its values are in `_values`."""
        self._write("{")

    def read(self, buffer: Buffer) -> Progress:
        while buffer:
            element = self._elements[-1]
            before = buffer.pos, len(self._elements), element.body
            read = self._read_text if element.body is Body.TEXT else self._read_tags
            progress = read(buffer, element)
            if progress is not Progress.MORE:
                return progress
            if before == (buffer.pos, len(self._elements), element.body):
                break
        return Progress.MORE

    def cut_off(self) -> None:
        """Ends the reading where no more text comes: of what was read only half a tag is lost.

        An argument that is not complete is written as the beginning of its JSON, its innermost value as text.
        """
        call, *rest = self._elements
        call.pieces = [without_begun_tag(call.text())]
        self._drop_unclaimed(call)
        self._settle_all()
        if rest and not rest[0].live:
            self._write_name(rest[0].name)
            self._write(self._begun(rest))

    def _begun(self, elements: list[Element]) -> str:
        """The beginning of the JSON text of open elements, of which each holds the next."""
        element, *rest = elements
        if not rest and not element.children:
            return quote(element.text())[:-1]
        self._drop_unclaimed(element)
        names = [*(name for name, _ in element.children), *(inner.name for inner in rest[:1])]
        if element.schema.takes_items(names):
            items = [*(dump(value) for _, value in element.children), *([self._begun(rest)] if rest else ())]
            return f"[{', '.join(items)}"
        last = [f"{quote(rest[0].name)}: {self._begun(rest)}"] if rest else []
        return f"{{{', '.join([*element.schema.members(element.children), *last])}"

    def _read_text(self, buffer: Buffer, element: Element) -> Progress:
        self._add_text(element, buffer.take(buffer.find(NAMESPACES)))
        if not buffer.text.startswith(NAMESPACE, buffer.pos):
            return Progress.MORE
        end = match_close(buffer, buffer.pos, element.name)
        if end >= 0:
            buffer.take(end)
            self._close()
            return Progress.MORE
        if end == NO and self._misread(buffer, element) == NO:
            self._add_text(element, buffer.take(buffer.pos + len(NAMESPACE)))
        return Progress.MORE

    def _misread(self, buffer: Buffer, element: Element) -> int:
        """Corrects an argument whose tag was the start of an elided argument's value, such as `<html>`."""
        call = self._elements[0].schema
        if len(self._elements) != 2 or element.live or not call.declared or element.name in call.declared:
            return NO
        tag = match_tag(buffer, buffer.pos)
        if isinstance(tag, int):
            return tag
        if not tag.closes or tag.name not in call.declared:
            return NO
        buffer.take(tag.end)
        self._elements.pop()
        self._add_argument(tag.name, call.child(tag.name).read(f"<{element.name}>{element.text()}"))
        return tag.end

    def _read_tags(self, buffer: Buffer, element: Element) -> Progress:
        text = buffer.take(buffer.find(NAMESPACES))
        if text:
            element.pieces.append(text)
            if element.body is Body.ANY and text.strip(WHITESPACE):
                element.body = Body.TEXT
                return Progress.MORE
        if not buffer.text.startswith(NAMESPACE, buffer.pos):
            return Progress.MORE
        tag = match_tag(buffer, buffer.pos)
        if len(self._elements) == 1:
            name, end = match_invoke(buffer, buffer.pos)
            if end == MORE:
                return Progress.MORE
            if name:
                self._end()
                return Progress.NEXT_CALL
        if tag == MORE:
            return Progress.MORE
        if tag == NO:
            element.pieces.append(buffer.take(buffer.pos + len(NAMESPACE)))
            if element.body is Body.ANY:
                element.body = Body.NAMELESS
            return Progress.MORE
        return self._read_close(buffer, element, tag) if tag.closes else self._open(buffer, element, tag)

    def _open(self, buffer: Buffer, parent: Element, tag: Tag) -> Progress:
        if parent.body is Body.NAMELESS:
            parent.body = Body.TEXT  # text came first: the tag belongs to it
            return Progress.MORE
        buffer.take(tag.end)
        name = tag.name
        self._drop_unclaimed(parent)
        parent.body = Body.CHILDREN
        schema = self._child_schema(parent, name)
        body = Body.TEXT if schema.is_scalar or len(self._elements) >= MAX_DEPTH else Body.ANY
        element = Element(name, schema, body, live=schema.is_text and len(self._elements) == 1)
        self._elements.append(element)
        if element.live:
            self._write_name(name)
            self._write('"')
        return Progress.MORE

    def _child_schema(self, parent: Element, name: str) -> Schema:
        names = [*(child for child, _ in parent.children[:1]), name]
        is_item = parent is not self._elements[0] and parent.schema.takes_items(names)
        return parent.schema.item(len(parent.children)) if is_item else parent.schema.child(name)

    def _read_close(self, buffer: Buffer, element: Element, tag: Tag) -> Progress:
        name = tag.name
        ends_block = name == BLOCK and name not in self._elements[0].schema.declared
        known = ends_block or any(outer.name == name for outer in self._elements)
        if not known and element.body is Body.ANY:
            element.body = Body.TEXT
            return Progress.MORE
        buffer.take(tag.end)
        if known:
            while not ends_block and self._elements[-1].name != name:
                self._close()
            if ends_block or len(self._elements) == 1:
                while len(self._elements) > 1:
                    self._close()
                self._end()
                return Progress.BLOCK_ENDED if ends_block else Progress.CALL_ENDED
            self._close()
        elif element.unclaimed():
            element.body = Body.CHILDREN
            text = element.take_elided(name)
            self._add_child(name, self._child_schema(element, name).read(text))
        else:
            element.pieces.clear()
        return Progress.MORE

    def _close(self) -> None:
        """Ends the innermost element, which is not the call."""
        element = self._elements.pop()
        if element.live:
            self._write('"')
            return
        if element.body is Body.CHILDREN:
            self._drop_unclaimed(element)
            value = element.schema.assemble(element.children)
        else:
            value = element.schema.read(element.text())
        self._add_child(element.name, value)

    def _end(self) -> None:
        self._drop_unclaimed(self._elements[0])
        self._settle_all()
        self._write("}")

    def _add_text(self, element: Element, text: str) -> None:
        if element.live:
            self._write(quote(text)[1:-1])
        elif text:
            element.pieces.append(text)

    def _drop_unclaimed(self, element: Element) -> None:
        if element.unclaimed():
            self.left_over.append(element.text().strip(WHITESPACE))
        element.pieces.clear()

    def _add_child(self, name: str, value: Value) -> None:
        if len(self._elements) > 1:
            self._elements[-1].children.append((name, value))
        else:
            self._add_argument(name, value)

    def _add_argument(self, name: str, value: Value) -> None:
        if self._waiting != name:
            self._settle()
        kinds = self._elements[0].schema.child(name).kinds
        if kinds and "array" not in kinds:
            self._write_name(name)
            self._write(dump(value))
            return
        self._values.setdefault(name, []).append(value)
        self._waiting = name

    def _settle(self) -> None:
        """Writes the argument that was waiting for more of its kind."""
        name, self._waiting = self._waiting, None
        if name in self._written:
            self._again[name] = None
        elif name is not None:
            self._write_argument(name)

    def _settle_all(self) -> None:
        """The same, and writes again what came again."""
        self._settle()
        for name in self._again:
            self._write_argument(name)

    def _write_argument(self, name: str) -> None:
        schema = self._elements[0].schema.child(name)
        self._write_name(name)
        self._write(dump(schema.combine(self._values[name])))

    def _write_name(self, name: str) -> None:
        self._settle()
        self._write(f"{', ' if self._written else ''}{quote(name)}: ")
        self._written.add(name)

    def _write(self, json_delta: str) -> None:
        self.out.append(CallArguments(self._index, json_delta))
