"""Access to one bucket: its boto3 client, and the addresses, proxies and credentials that the fast path shares.

What always holds: one call is one attempt; a response, or a server that takes a body, is an error once it stalls longer
than the read timeout; credentials stay inside boto3 and obstore and are never formatted, and none are looked up where
requests are not to be signed; every request goes where botocore reads from the environment (``https_proxy``,
``http_proxy``, ``no_proxy``) that it should.

Made once for each store by `store.open_s3`; the client may be used from many threads.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import gzip
import io
import math
import os
import socket
import ssl
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from ssl import SSLContext
from typing import Any
from urllib.parse import quote, urlsplit

import boto3
import boto3.session
import botocore.session
import msgspec
import urllib3
from botocore import UNSIGNED
from botocore import exceptions as boto
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSPreparedRequest, AWSRequest, AWSResponse
from botocore.config import Config
from botocore.handlers import add_expect_header
from botocore.hooks import HierarchicalEmitter
from botocore.httpsession import ProxyConfiguration
from botocore.loaders import JSONFileLoader, Loader
from botocore.model import OperationModel
from botocore.utils import get_environ_proxies
from msgspec import structs

from lakefs_fuse.config import StoreConfig
from lakefs_fuse.environment.clock import Clock
from lakefs_fuse.errors import AccessDenied, ConfigError, LakeError
from lakefs_fuse.product import ENVIRONMENT_PREFIX, PROGRAM
from lakefs_fuse.store.s3.advice import NO_CREDENTIALS
from lakefs_fuse.store.s3.errors import from_boto, refuse_page
from lakefs_fuse.store.s3.http_session import HttpSession, shared_context
from lakefs_fuse.store.s3.key_files import REREAD_S, follow_files
from lakefs_fuse.store.s3.renewal import limit_renewals
from lakefs_fuse.store.s3.stored_objects import STORING_OPERATIONS, boto3_encryption

DEFAULT_REGION = "us-east-1"
CONNECTIONS_MIN = 64
CACHE_TOKEN = f"{ENVIRONMENT_PREFIX}CLUSTER_CACHE_TOKEN"
"""Environment variable of the password that the proxies of a cluster cache ask for."""
CACHE_CONNECT_S_MAX = 0.5
"""A proxy of a cluster cache must be near to be useful."""
DIRECTORY_BUCKET = "--x-s3"
"""How names of directory buckets end. They take sessions in place of signatures, and list in no order."""
SLOW_OPERATIONS = ("PutObject", "UploadPart", "UploadPartCopy", "CopyObject", "CompleteMultipartUpload")
"""Requests with large bodies, and those for which the store reads or joins large objects before it responds."""
SOCKET_OPTIONS = [(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1), (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)]
PAYER_HEADER = "x-amz-request-payer"
CREDENTIAL_TTL = timedelta(minutes=5, seconds=REREAD_S)
"""Obstore asks again 5 minutes before the end that it was told (TokenCache of object_store), so as often as files of
keys are read; at most ten times a second where they end sooner."""

Boto3Client = Any
"""botocore makes its methods at run time; every answer is checked where it is used."""


@dataclass(frozen=True, slots=True)
class S3Access:
    """How one bucket is reached."""

    config: StoreConfig
    client: Boto3Client
    region: str
    base_url: str
    """Scheme, host and path in front of ``/bucket/key`` (path style) or ``/key`` (virtual hosts); no credentials."""
    virtual_host: bool
    ca_bundle: str | None
    clock: Clock
    session_credentials: Any = field(repr=False)
    """botocore's, which it renews, or read from a file again; None where requests are not signed."""
    proxies: Mapping[str, str] = field(repr=False)
    """What botocore's requests use: URLs by scheme, which may hold a password."""
    requests: HttpSession = field(repr=False)
    """Connections of all requests but uploads."""
    uploads: HttpSession = field(repr=False)

    def credentials(self) -> dict[str, object]:
        """The callback by which obstore gets credentials, in its format."""
        frozen = self.session_credentials.get_frozen_credentials()
        kept_until = datetime.fromtimestamp(self.clock.wall_ns() / 1e9, UTC) + CREDENTIAL_TTL
        ends: datetime | None = getattr(self.session_credentials, "_expiry_time", None)
        return {
            "access_key_id": frozen.access_key,
            "secret_access_key": frozen.secret_key,
            "token": frozen.token,
            "expires_at": kept_until if ends is None else min(kept_until, ends.astimezone(UTC)),
        }

    def prepare_get(self, url: str, parameters: dict[str, str]) -> AWSPreparedRequest:
        """A GET of a URL with parameters, signed in its headers: the URL holds nothing secret."""
        request = AWSRequest("GET", url, params=parameters)
        if self.config.requester_pays:
            _add_payer(request)
        if self.session_credentials is not None:
            S3SigV4Auth(self.session_credentials.get_frozen_credentials(), "s3", self.region).add_auth(request)
        prepared: AWSPreparedRequest = request.prepare()
        return prepared

    @property
    def proxy_url(self) -> str | None:
        """The proxy of requests to the store; None where they go straight there."""
        return ProxyConfiguration(dict(self.proxies)).proxy_url_for(self.base_url) or None

    def through_cache(self, url: str) -> S3Access:
        """The same bucket through a caching proxy. Requests are signed for the store and go to the proxy as ``http``,
        because it has to read them; it passes them on over the store's own scheme."""
        proxy, store = urlsplit(url), urlsplit(self.base_url)
        token = os.environ.get(CACHE_TOKEN, "")
        credentials = f"{PROGRAM}:{quote(token, safe='')}@" if token else ""
        host = store.netloc.removesuffix(":443") if self.encrypted else store.netloc
        return replace(
            self,
            config=structs.replace(self.config, connect_timeout_s=CACHE_CONNECT_S_MAX),
            base_url=f"http://{host}{store.path}",
            proxies={"http": f"{proxy.scheme}://{credentials}{proxy.netloc}"},
        )

    def close(self) -> None:
        """Close connections."""
        self.requests.close()
        self.uploads.close()
        self.client.close()

    @property
    def bucket_url(self) -> str:
        """Where listings are asked for."""
        return f"{self.base_url}/" if self.virtual_host else f"{self.base_url}/{self.config.source.bucket}"

    @property
    def encrypted(self) -> bool:
        """Whether TLS already vouches for every byte on the wire."""
        return self.base_url.startswith("https:")


def connect(config: StoreConfig, clock: Clock) -> S3Access:
    """Build, without a request to the store. Raises ConfigError, AccessDenied where there are no credentials."""
    if config.addressing_style not in ("auto", "path", "virtual"):
        raise ConfigError(f"addressing style {config.addressing_style!r}: expected auto, path or virtual")
    if config.source.bucket.endswith(DIRECTORY_BUCKET):
        raise ConfigError(
            f"{config.source}: directory buckets (S3 Express One Zone) cannot be mounted: use a general purpose bucket"
        )
    ca_bundle = _checked_ca_bundle(config.ca_bundle)
    with _configuration_errors(config):
        core = botocore.session.Session(
            event_hooks=copy.copy(_builtin_handlers()), include_builtin_handlers=False, profile=config.profile
        )
        core.register_component("data_loader", service_files(core.get_config_variable("data_path")))
        session = boto3.session.Session(region_name=config.region, botocore_session=core)
        follow_files(core.get_component("credential_provider"), clock)
        region = session.region_name or DEFAULT_REGION
        if ca_bundle is None:
            # boto3 also reads it from AWS_CA_BUNDLE and its own configuration file; the fast paths must follow.
            ca_bundle = _checked_ca_bundle(session._session.get_config_variable("ca_bundle"))
        client: Boto3Client = session.client(
            "s3",
            region_name=region,
            endpoint_url=config.endpoint_url,
            config=_client_config(config),
        )
        credentials = None if config.unsigned else session.get_credentials()
        limit_renewals(credentials, clock)
        _register_handlers(client, config)
    if credentials is None and not config.unsigned:
        raise AccessDenied(f"{config.source}: {NO_CREDENTIALS}")
    base_url, virtual_host = _where(client, config.source.bucket)
    _check_endpoint(base_url)
    proxies = get_environ_proxies(client.meta.endpoint_url)
    verified = {
        "verify": ca_bundle or True,
        "proxies": dict(proxies),
        "max_pool_connections": max(CONNECTIONS_MIN, 2 * config.requests_max),
    }
    context = shared_context()
    access = S3Access(
        config=config,
        client=client,
        region=region,
        base_url=base_url,
        virtual_host=virtual_host,
        ca_bundle=ca_bundle,
        clock=clock,
        session_credentials=credentials,
        proxies=proxies,
        requests=_session_of_requests(context, config, verified),
        uploads=_session_of_uploads(context, config, verified),
    )
    client.meta.events.register("before-send.s3", partial(_send, access))
    if (access.proxy_url or "").count("://") > 1:  # botocore takes any other scheme for a host, and would quote it.
        raise ConfigError("http_proxy or https_proxy: expected http://[user:password@]host:port")
    return access


def _client_config(config: StoreConfig) -> Config:
    return Config(
        signature_version=UNSIGNED if config.unsigned else "s3v4",
        retries={"total_max_attempts": 1, "mode": "standard"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        # Hashing a payload for the signature costs 12 ms for 16 MiB, and of the servers tried none compares it.
        # `upload` says what guards the bytes instead.
        s3={**_addressing(config), "payload_signing_enabled": False},
    )


def _register_handlers(client: Boto3Client, config: StoreConfig) -> None:
    """Changes to the requests of every caller."""
    # botocore asks servers for leave to send a body. That is a round trip for each part, and a whole second with a
    # server that does not know the custom; a refusal comes through just as well without.
    client.meta.events.unregister("before-call.s3", add_expect_header)
    for operation in STORING_OPERATIONS:
        client.meta.events.register(f"before-parameter-build.s3.{operation}", partial(_add_encryption, config))
    client.meta.events.register("after-call.s3", _refuse_page)
    if config.requester_pays:
        client.meta.events.register("before-sign.s3", _add_payer)


def _session_of_requests(context: SSLContext, config: StoreConfig, verified: Mapping[str, Any]) -> HttpSession:
    return HttpSession(
        context,
        timeout=(config.connect_timeout_s, config.quick_read_timeout_s),
        socket_options=SOCKET_OPTIONS,
        **verified,
    )


def _session_of_uploads(context: SSLContext, config: StoreConfig, verified: Mapping[str, Any]) -> HttpSession:
    """Its connect timeout is the read timeout: urllib3 applies the connect timeout while it sends a body. The kernel
    ends an attempt to connect that is not answered."""
    return HttpSession(
        context,
        timeout=(config.read_timeout_s, config.read_timeout_s),
        socket_options=[
            *SOCKET_OPTIONS,
            (socket.IPPROTO_TCP, socket.TCP_SYNCNT, _syn_retries(config.connect_timeout_s)),
        ],
        **verified,
    )


def _syn_retries(connect_timeout_s: float) -> int:
    """How often the kernel repeats a SYN before it gives up, which takes this time or the next longer one: Linux waits
    1 s for an answer, and each time twice as long."""
    return max(1, math.ceil(math.log2(connect_timeout_s + 1)) - 1)


def _send(access: S3Access, request: AWSPreparedRequest, event_name: str, **_: object) -> AWSResponse:
    """Send a request of the client, in place of the client's own session."""
    is_slow = event_name.rpartition(".")[2] in SLOW_OPERATIONS
    return (access.uploads if is_slow else access.requests).send(request)


def _addressing(config: StoreConfig) -> dict[str, str]:
    """``auto`` is not told to botocore, which would then not look into its own configuration."""
    return {} if config.addressing_style == "auto" else {"addressing_style": config.addressing_style}


def _add_payer(request: AWSRequest, **_: object) -> None:
    """Every request, while its signature is yet to be made. botocore's parameter RequestPayer is missing from some."""
    request.headers[PAYER_HEADER] = "requester"


def _refuse_page(http_response: AWSResponse, model: OperationModel, **_: object) -> None:
    """botocore takes a page that is XML for the answer. Raises WebPage."""
    if http_response.status_code < 300 and not model.has_streaming_output:
        refuse_page(http_response.content)


def _add_encryption(config: StoreConfig, params: dict[str, object], **_: object) -> None:
    params |= boto3_encryption(config)


@functools.cache
def _builtin_handlers() -> HierarchicalEmitter:
    """The built-in handlers of botocore. Each session gets a copy, because registering them takes some 15 ms."""
    handlers = HierarchicalEmitter()
    botocore.session.Session(event_hooks=handlers)
    return handlers


def _check_endpoint(url: str) -> None:
    """Raises ConfigError for a URL with a password: errors, logs and statistics name the endpoint."""
    if "@" in urlsplit(url).netloc:
        raise ConfigError(
            "the endpoint's URL in AWS_ENDPOINT_URL, AWS_ENDPOINT_URL_S3 or ~/.aws/config must not hold credentials: "
            "put them in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or in ~/.aws/credentials"
        )


def _checked_ca_bundle(path: object) -> str | None:
    if path is None or path == "":
        return None
    if not isinstance(path, str) or not os.path.isfile(path):
        raise ConfigError(f"CA bundle {path}: no such file; name a file of PEM certificates, not a directory")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"CA bundle {path} cannot be read, or holds no certificate in PEM format: {error}") from error
    return path


@contextlib.contextmanager
def _configuration_errors(config: StoreConfig) -> Iterator[None]:
    try:
        yield
    except LakeError:
        raise
    except boto.ProfileNotFound as error:
        profile = config.profile or os.environ.get("AWS_PROFILE")
        raise ConfigError(
            f"profile {profile!r} is not configured: check --profile, AWS_PROFILE and ~/.aws/config"
        ) from error
    except boto.InvalidRegionError as error:
        raise ConfigError(f"region {config.region!r} is not a region's name") from error
    except ValueError as error:
        raise ConfigError(f"endpoint {config.endpoint_url!r}: expected http://host:port or https://host") from error
    except (boto.NoCredentialsError, boto.PartialCredentialsError, boto.CredentialRetrievalError) as error:
        raise from_boto(str(config.source), error) from error
    except boto.BotoCoreError as error:
        raise ConfigError(f"{config.source}: AWS configuration cannot be used ({type(error).__name__})") from error


def _where(client: Boto3Client, bucket: str) -> tuple[str, bool]:
    """boto3's own answer to where an object of the bucket lies: the URL it was about to send a request to.

    Presigned URLs do not show it, as botocore makes them for the global endpoint whatever the region.
    """
    seen: list[str] = []

    def answer(request: AWSPreparedRequest, **_: object) -> AWSResponse:
        seen.append(request.url)
        return AWSResponse(request.url, 200, {}, urllib3.HTTPResponse(io.BytesIO(), preload_content=False))

    event, name = "before-send.s3.HeadObject", "lakefs-fuse-where"
    client.meta.events.register_first(event, answer, unique_id=name)
    try:
        client.head_object(Bucket=bucket, Key="k")
    except boto.ParamValidationError as error:
        raise ConfigError(f"{bucket!r} is not a bucket's name") from error
    except boto.EndpointProviderError as error:
        raise ConfigError(
            f"bucket {bucket!r} has no endpoint with these settings: check --region, and use_accelerate_endpoint, "
            "use_dualstack_endpoint and use_fips_endpoint in ~/.aws/config"
        ) from error
    except (boto.BotoCoreError, ValueError) as error:
        raise from_boto(f"bucket {bucket!r}", error) from error
    finally:
        client.meta.events.unregister(event, unique_id=name)
    parts = urlsplit(seen[0])
    tail = f"/{bucket}/k"
    if parts.path.endswith(tail):
        return f"{parts.scheme}://{parts.netloc}{parts.path.removesuffix(tail)}", False
    return f"{parts.scheme}://{parts.netloc}{parts.path.removesuffix('/k')}", True


# -- the files that botocore makes a client from: models of services, rules about endpoints, and regions


@functools.cache
def service_files(search_path: str | None) -> Loader:
    """What botocore's own loader reads and parses to make a client, also in AWS_DATA_PATH and ``~/.aws/models``; kept
    for the next client: to find a lake takes one for each level of the path. ``search_path`` is AWS_DATA_PATH."""
    directories = [os.path.expandvars(each) for each in (search_path or "").split(os.pathsep) if each]
    return _Services(extra_search_paths=list(map(os.path.expanduser, directories)), file_loader=_Files())


class _Files(JSONFileLoader):  # type: ignore[misc]
    """Makes a dict of each object, which keeps its order. botocore makes an OrderedDict: three times the CPU time, and
    4 MiB more for S3."""

    def load_file(self, file_path: str) -> object:
        """The content of a file, which is named without its ending; None if there is none. Raises ConfigError."""
        for ending, open_file in (("json", open), ("json.gz", gzip.open)):
            path = f"{file_path}.{ending}"
            with contextlib.suppress(FileNotFoundError), open_file(path, "rb") as file:
                return _parsed(path, file.read())
        return None


def _parsed(path: str, text: bytes) -> object:
    try:
        return msgspec.json.decode(text)
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path}: {error}: repair this file of AWS_DATA_PATH or ~/.aws/models") from error


class _Services(Loader):  # type: ignore[misc]
    """Takes each directory for a service. botocore looks for files in all 400 of them, twice for each client, only to
    check the name of one."""

    def list_available_services(self, type_name: str) -> list[str]:
        """Names of services, of which some may have no file of this type."""
        return sorted({name for path in self.search_paths if os.path.isdir(path) for name in os.listdir(path)})
