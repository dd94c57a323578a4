"""How objects are stored: with which encryption, and in which storage class; in the forms of boto3 and of obstore.

What always holds: *every object is encrypted as the configuration says*, whichever client stores it, in whichever
request (PutObject, CreateMultipartUpload, CopyObject). The storage class is that of files; `storage_class_of` has what
this program keeps for itself. What is there already stays as it is.

Pure functions, called from any thread.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from lakefs_fuse.config import StoreConfig
from lakefs_fuse.product import RESERVED_PREFIX

STORING_OPERATIONS = ("PutObject", "CreateMultipartUpload", "CopyObject")
"""Requests that make an object: parts and completions follow the upload that they belong to."""
BILLED_BYTES_MIN = 128 << 10
"""Smaller objects are billed as if they had this size in the classes for infrequent access:
https://docs.aws.amazon.com/AmazonS3/latest/userguide/storage-class-intro.html."""

_ALGORITHMS = {"s3": "AES256", "kms": "aws:kms"}
_OF_OBSTORE = (
    "AWS_SERVER_SIDE_ENCRYPTION", "AWS_SSE_KMS_KEY_ID", "AWS_SSE_BUCKET_KEY_ENABLED", "AWS_CHECKSUM_ALGORITHM",
)  # fmt: skip
"""Variables that obstore reads and boto3 does not."""


def encryption_of(config: StoreConfig) -> tuple[str, str]:
    """Algorithm as S3 names it, and id of the key of KMS; empty where the bucket decides."""
    kind, _, key_id = config.sse.partition(":")
    return _ALGORITHMS.get(kind, ""), key_id


def boto3_encryption(config: StoreConfig) -> dict[str, str]:
    """Parameters of `STORING_OPERATIONS`."""
    algorithm, key_id = encryption_of(config)
    found = {"ServerSideEncryption": algorithm, "SSEKMSKeyId": key_id}
    return {name: value for name, value in found.items() if value}


def obstore_encryption(config: StoreConfig) -> dict[str, str]:
    """Configuration of an S3Store. Where the bucket decides and the environment says otherwise, one that changes
    nothing about GET, to which obstore would add the key of a customer."""
    algorithm, key_id = encryption_of(config)
    if not algorithm and is_told_by_environment(os.environ):
        return {"server_side_encryption": _ALGORITHMS["s3"]}
    found = {"server_side_encryption": algorithm, "sse_kms_key_id": key_id}
    return {name: value for name, value in found.items() if value}


def is_told_by_environment(environment: Mapping[str, str]) -> bool:
    """Whether obstore would store objects otherwise than boto3: then boto3 stores all of them."""
    return any(environment.get(name) for name in _OF_OBSTORE)


def storage_class_of(config: StoreConfig, key: str, size: int | None) -> str:
    """The class of a new object; empty for the store's default. ``size`` is None where it is not known yet, as of
    uploads in parts and of copies. Small objects below ``.lakefs/`` (commits of names, records, leases) are read often
    and live briefly, which other classes charge for."""
    if key.startswith(RESERVED_PREFIX) and size is not None and size < BILLED_BYTES_MIN:
        return ""
    return config.storage_class
