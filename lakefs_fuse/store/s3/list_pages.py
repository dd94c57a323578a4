"""LIST requests with a parser of our own: botocore's holds the GIL for 100 ms per 1,000 keys, this one for 2 ms.

An answer in the usual form, which is that of its first object for all of them, is taken apart by one regular
expression; any other by expat (9 ms).

The request is signed, if at all, by botocore's signer and sent by the HTTP session of every other call.

Called from any worker thread.
"""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from functools import lru_cache
from html import unescape
from urllib.parse import unquote_plus
from xml.etree import ElementTree

from lakefs_fuse.errors import StoreError
from lakefs_fuse.store.protocol import ETAG_CHARS_MAX, ListPage, ObjectMeta, read_etag
from lakefs_fuse.store.s3 import advice
from lakefs_fuse.store.s3.access import S3Access
from lakefs_fuse.store.s3.errors import RAISED_BY_BOTO, REGION_HEADER, from_boto, from_page, from_xml


class S3Pages:
    """Sends LIST requests to one bucket."""

    def __init__(self, access: S3Access) -> None:
        self._access = access

    def page(
        self,
        prefix: str,
        delimiter: str,
        start_after: str,
        token: str | None,
        keys_max: int,
        *,
        lake: str | None = None,
    ) -> ListPage:
        """See `ObjectStore.list_page`; keys are relative to ``lake``, which is the source's prefix if it is None."""
        if lake is None:
            lake = self._access.config.source.prefix
        parameters = {
            "list-type": "2",
            "prefix": lake + prefix,
            "encoding-type": "url",
            "max-keys": str(keys_max),
        }
        if delimiter:
            parameters["delimiter"] = delimiter
        before, _, theirs = (token or "").rpartition(END)
        if token is not None:
            parameters["continuation-token"] = theirs
        elif start_after:
            parameters["start-after"] = lake + start_after
        what = f"list {prefix!r}" if prefix else "list the lake"
        try:
            response = self._access.requests.send(self._access.prepare_get(self._access.bucket_url, parameters))
            status, body = int(response.status_code), bytes(response.content)
        except RAISED_BY_BOTO as error:
            raise from_boto(what, error) from error
        if status != 200:
            region, signed = response.headers.get(REGION_HEADER, ""), not self._access.config.unsigned
            raise from_xml(what, status, body, region, signed=signed)
        try:
            page = parse_page(body, len(lake))
        except (ElementTree.ParseError, ValueError) as error:
            if (error_page := from_page(what, body)) is not None:
                raise error_page from error
            raise from_boto(what, ElementTree.ParseError(str(error))) from error
        first = page.objects[0].key if page.objects else ""
        if token is not None and (page.next_token == theirs or (first and first == before)):
            raise StoreError(f"{what}: {advice.LIST_REPEATED}")
        if page.next_token is None:
            return page
        return replace(page, next_token=f"{first or before}{END}{page.next_token}")


END = "\0"
"""Between the first key of a page and the store's token of the next one. A next page that begins with the same key is
the same page, and the listing would not end. Prefixes do not show that: some stores repeat one on page after page."""
SIZE_END = 10**14
"""Bytes of an object are less: S3's largest has half as many, and a commit can name more."""
PATTERNS_MAX = 64
"""Directories whose regular expressions are kept."""
_FIELDS = {
    "Key": "([^<&]*)",
    "Size": "([0-9]{1,14})",
    "ETag": rf"""(?:&quot;|&#34;|")?([ !#-%'-;=-~]{{0,{ETAG_CHARS_MAX}}})(?:&quot;|&#34;|")?""",
    "LastModified": "([^<&]*)",
}
_FIELD = re.compile("<(" + "|".join(_FIELDS) + ")>")
_PREFIX = re.compile("<CommonPrefixes><Prefix>([^<&]*)</Prefix></CommonPrefixes>")
_TOKEN = re.compile("<NextContinuationToken>([^<]*)</NextContinuationToken>")


@lru_cache(PATTERNS_MAX)
def _objects(order: tuple[str, ...], above: str) -> re.Pattern[str]:
    """An object whose fields come in this order, with others between them perhaps, and whose quoted key begins with
    ``above``."""
    between = "(?:(?!</?Contents>|" + "|".join(f"<{name}>" for name in _FIELDS) + ")<[^<>]*>[^<>]*)*?"
    fields = {name: f"<{name}>{re.escape(above) if name == 'Key' else ''}{_FIELDS[name]}</{name}>" for name in order}
    return re.compile("<Contents>" + "".join(between + fields[name] for name in order))


def parse_page(body: bytes, skip: int) -> ListPage:
    """An answer to ListObjectsV2; the first ``skip`` characters of every key are the source's prefix.

    Raises ParseError or ValueError for anything else, StoreError for an ETag that a lake cannot keep.
    """
    return parse_usual(body, skip) or parse_any(body, skip)


def parse_usual(body: bytes, skip: int) -> ListPage | None:
    """As `parse_page`; None for an answer that is not as most are, or is none."""
    text = body.decode()
    first = text.find("<Contents>")
    usual = "<ListBucketResult" in text and "<!" not in text and "<EncodingType>url<" in text
    if not usual or not text.endswith("</ListBucketResult>"):
        return None
    metas: list[ObjectMeta] | None = []
    if first >= 0:
        metas = _metas(text, text[first : text.find("</Contents>", first)], skip)
    prefixes = _PREFIX.findall(text)
    truncated = "<IsTruncated>true<" in text
    tokens = _TOKEN.findall(text)
    if metas is None or len(prefixes) != text.count("<CommonPrefixes>"):
        return None
    if truncated != bool(tokens and tokens[0]) or len(tokens) > 1:
        return None
    return ListPage(metas, [unquote_plus(each)[skip:] for each in prefixes], unescape(tokens[0]) if truncated else None)


def _metas(text: str, first: str, skip: int) -> list[ObjectMeta] | None:
    """All objects of a page, whose first is this; None where some are otherwise."""
    order = tuple(_FIELD.findall(first))
    if sorted(order) != sorted(_FIELDS):
        return None
    begin = first.index("<Key>") + len("<Key>")
    above = _directory(first[begin : first.index("</Key>")])
    if "&" in above:
        return None
    found = _objects(order, above).findall(text)
    if len(found) != text.count("<Contents>"):
        return None
    key_at, size_at, etag_at, modified_at = map(order.index, ("Key", "Size", "ETag", "LastModified"))
    times = {text: time_ns(text) for text in {row[modified_at] for row in found}}
    base = unquote_plus(above)
    if len(base) < skip:
        return None
    base = base[skip:]
    return [
        ObjectMeta(base + _plain(row[key_at]), int(row[size_at]), row[etag_at], times[row[modified_at]])
        for row in found
        if base or row[key_at]
    ]


def _plain(quoted: str) -> str:
    return unquote_plus(quoted) if "%" in quoted or "+" in quoted else quoted


def _directory(key: str) -> str:
    """What a quoted key begins with, up to its last slash: it is the same for a whole directory."""
    slash = key.rfind("%2F")
    return key[: max(slash + 3 if slash >= 0 else 0, key.rfind("/") + 1)]


def parse_any(body: bytes, skip: int) -> ListPage:
    """As `parse_page`, of any answer, with an XML parser."""
    root = ElementTree.fromstring(body)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]  # without the namespace
    if root.tag != "ListBucketResult":
        raise ValueError(f"not a listing but {root.tag!r}")
    unquoted = unquote_plus if root.findtext("EncodingType") == "url" else str
    keys = [(unquoted(each.findtext("Key") or "")[skip:], each) for each in root.findall("Contents")]
    objects = [
        ObjectMeta(
            key,
            _size(each.findtext("Size") or "0"),
            read_etag(each.findtext("ETag")),
            time_ns(each.findtext("LastModified") or ""),
        )
        for key, each in keys
        if key
    ]
    prefixes = [unquoted(each.findtext("Prefix") or "")[skip:] for each in root.findall("CommonPrefixes")]
    truncated, token = root.findtext("IsTruncated") == "true", root.findtext("NextContinuationToken")
    if truncated and not token:
        raise ValueError("a listing that goes on but does not say where")
    return ListPage(objects, prefixes, token if truncated else None)


def _size(text: str) -> int:
    size = int(text)
    if not 0 <= size < SIZE_END:
        raise ValueError(f"an object of {text[:40]} bytes")
    return size


def time_ns(text: str) -> int:
    """ISO 8601 to ns since the epoch, in whole seconds: some stores give more, and none does in the header of a HEAD. 0
    where there is none."""
    if not text:
        return 0
    return int(datetime.fromisoformat(text).timestamp()) * 1_000_000_000
