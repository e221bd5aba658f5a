"""Calls the members of an etcd cluster over gRPC: one member, and the next one when that fails."""

import asyncio
import logging
import ssl
from collections.abc import Iterator
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import grpc  # type: ignore[import-untyped,unused-ignore]

from keyloft import limits
from keyloft.clock import Clock, SystemClock
from keyloft.core.urls import EtcdAddress
from keyloft.engines.etcd import errors, messages
from keyloft.engines.etcd.errors import Failure
from keyloft.errors import CannotOpen, Closed

logger = logging.getLogger(__name__)

_BAD_RELEASES: Final = ("3.5.0", "3.5.1", "3.5.2")
_OLDEST_RELEASE: Final = (3, 4)
_SILENT, _ANSWER = limits.ETCD_KEEPALIVE_SECONDS
_OPTIONS: Final = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # Retries are made here, not by gRPC, because here it is known what a try may have done.
    ("grpc.enable_retries", 0),
    # Each engine has its own connection, so that it does not wait behind what another engine transfers.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", round(1000 * limits.ETCD_CONNECT_SECONDS)),
    ("grpc.keepalive_time_ms", 1000 * _SILENT),
    ("grpc.keepalive_timeout_ms", 1000 * _ANSWER),
)
# A member that has lost its leader says so at once, and does not wait for the next one.
_WITH_LEADER: Final = ("hasleader", "true")


class EtcdMember:
    """The connection to one member; it connects by itself."""

    def __init__(self, endpoint: str, credentials: Any, server_name: str | None) -> None:
        options: list[tuple[str, Any]] = list(_OPTIONS)
        if server_name is not None:
            options.append(("grpc.ssl_target_name_override", server_name))
        self.endpoint = endpoint
        self.channel = (
            grpc.aio.insecure_channel(endpoint, options=options)
            if credentials is None
            else grpc.aio.secure_channel(endpoint, credentials, options=options)
        )
        self.calls = {name: self._method(name) for name in messages.METHODS}

    def _method(self, name: str) -> Any:
        _, request, response = messages.METHODS[name]
        make = self.channel.stream_stream if name == "Watch" else self.channel.unary_unary
        return make(
            messages.path(name), request_serializer=request.SerializeToString, response_deserializer=response.FromString
        )


class EtcdCluster:
    """Some members of a cluster. All calls go to one of them, until it fails."""

    def __init__(
        self, address: EtcdAddress, clock: Clock | None = None, *, patience: float = limits.SERVER_SECONDS
    ) -> None:
        """`patience` is for how many seconds a call is repeated while no member answers."""
        self.address = address
        self.name = address.name
        self.patience = patience
        self.clock: Clock = clock or SystemClock()
        self._credentials = _credentials(address) if address.tls else None
        self.members = [self._member(endpoint) for endpoint in address.endpoints]
        """The members that the URL names, then other members that these know."""
        self._current = 0
        self._learning: asyncio.Task[None] | None = None
        self._token: str | None = None
        self._cluster_id = 0
        self._closed = False

    def _member(self, endpoint: str) -> EtcdMember:
        return EtcdMember(endpoint, self._credentials, self.address.server_name)

    @property
    def member(self) -> EtcdMember:
        """The member that is asked now."""
        return self.members[self._current]

    async def call(self, method: str, request: Any, seconds: float, member: EtcdMember | None = None) -> Any:
        """Try a request once.

        Raises:
            Failure: It was not answered. The next call goes to another member if this one may be at fault.
        """
        if self._closed:
            raise Closed
        asked = member or self.member
        try:
            metadata = await self.metadata(asked, seconds)
            response = await asked.calls[method](request, timeout=seconds, metadata=metadata)
            self._check_cluster(asked, response.header.cluster_id)
            return response
        except Failure as error:
            self.failed(asked, error)
            raise

    def failed(self, member: EtcdMember, error: Any) -> None:
        """After a failed request to this member, log in again, or turn to another member, if that may help."""
        if errors.is_logged_out(error):
            self._token = None
        elif errors.is_lost(error) and member is self.member:
            self._current = (self._current + 1) % len(self.members)

    def _check_cluster(self, member: EtcdMember, cluster_id: int) -> None:
        """Refuse the answer of a member that was set up as a cluster of its own, with other data or none.

        Raises:
            Failure: It belongs to another cluster than the first member that answered.
        """
        self._cluster_id = self._cluster_id or cluster_id
        if cluster_id not in (0, self._cluster_id):  # some replies don't name their cluster
            raise errors.of_another_cluster(member.endpoint)

    async def ask(self, method: str, request: Any, arrived: float | None = None) -> Any:
        """Try a request that changes nothing, or may be carried out twice, until it is answered.

        Args:
            method: One of `messages.METHODS`.
            request: Its request.
            arrived: When the caller's patience began, by the event loop's time; now if left out.

        Raises:
            DatabaseError: No member answered in time, or one refused the request; the message says why.
            Failure: The revision to be read is compacted.
        """
        began = asyncio.get_running_loop().time() if arrived is None else arrived
        seconds = limits.ETCD_TRY_SECONDS
        while True:
            try:
                return await self.call(method, request, seconds)
            except Failure as error:
                if errors.is_compacted(error):
                    raise
                await self.pause(error, began)
            seconds = min(2 * seconds, limits.ETCD_LONGEST_TRY_SECONDS)

    async def pause(self, error: Any, arrived: float) -> None:
        """Wait before the next try.

        Raises:
            DatabaseError: Another try would not help, or time is up.
        """
        time = asyncio.get_running_loop().time()
        if not errors.may_succeed_later(error) or time > arrived + self.patience:
            raise errors.explain(self.name, error) from error
        await asyncio.sleep(limits.ETCD_RETRY_SECONDS)

    async def metadata(self, member: EtcdMember, seconds: float) -> tuple[tuple[str, str], ...]:
        """The metadata of each request, which names its user."""
        if not self.address.user:
            return (_WITH_LEADER,)
        if self._token is None:
            login = messages.AuthenticateRequest(name=self.address.user, password=self.address.password)
            try:
                self._token = (await member.calls["Authenticate"](login, timeout=seconds)).token
            except Failure as error:
                if "authentication is not enabled" not in errors.details(error):
                    raise
                self._token = ""
        return (_WITH_LEADER, ("token", self._token)) if self._token else (_WITH_LEADER,)

    async def learn_members(self) -> None:
        """Find members that the URL does not name: once the named ones are replaced, only these are left."""
        try:
            found = await self.call("MemberList", messages.MemberListRequest(), limits.ETCD_TRY_SECONDS)
        except Failure as error:
            logger.debug("%s does not list its members: %s", self.name, errors.details(error))
            return
        named = self.members[: len(self.address.endpoints)]
        known = {member.endpoint: member for member in self.members[len(named) :]}
        advertised = dict.fromkeys(
            [each for one in found.members if not one.is_learner for each in self._endpoints_of(one)]
        )
        others = [endpoint for endpoint in advertised if endpoint not in self.address.endpoints]
        current = self.member
        learned = [known.get(endpoint) or self._member(endpoint) for endpoint in others]
        self.members = [*named, *learned]
        self._current = self.members.index(current) if current in self.members else 0
        for endpoint in known.keys() - advertised.keys():
            await known[endpoint].channel.close()

    def _endpoints_of(self, member: Any) -> Iterator[str]:
        """The addresses at which a member says that clients reach it, without those for its own machine alone."""
        is_local = any([_is_loopback(endpoint.rpartition(":")[0]) for endpoint in self.address.endpoints])
        for url in member.client_urls:
            parts = urlsplit(url)
            is_spoken = parts.scheme == ("https" if self.address.tls else "http")
            if is_spoken and parts.hostname and (is_local or not _is_loopback(parts.hostname)):
                yield parts.netloc

    def follow_members(self) -> None:
        """Learn of new members now and then, until this is closed."""
        self._learning = asyncio.create_task(self._follow_members(), name="keyloft members")

    async def _follow_members(self) -> None:
        while True:
            await asyncio.sleep(limits.ETCD_MEMBERS_SECONDS)
            await self.learn_members()

    async def check_members(self) -> None:
        """Refuse members of a release that can't be used, and of several clusters, as far as they answer.

        Raises:
            CannotOpen: It names the members.
        """
        statuses = await self.statuses()
        for endpoint, status in statuses.items():
            if refusal := refusal_of(status.version):
                raise CannotOpen(f"{endpoint} runs etcd {status.version}{refusal}")
        if len({status.header.cluster_id for status in statuses.values()}) > 1:
            raise CannotOpen(
                f"{self.name}: these members belong to different clusters: {', '.join(statuses)}; remove those of "
                "other clusters from the URL, or let them join with --initial-cluster-state=existing"
            )

    async def statuses(self) -> dict[str, Any]:
        """The status of each member that answers."""

        async def status(member: EtcdMember) -> Any:
            try:
                metadata = await self.metadata(member, limits.ETCD_TRY_SECONDS)
                # A member that knows no leader has a status, too.
                login = [pair for pair in metadata if pair is not _WITH_LEADER]
                return await member.calls["Status"](
                    messages.StatusRequest(), timeout=limits.ETCD_TRY_SECONDS, metadata=login
                )
            except Failure as error:
                self.failed(member, error)
                return None

        answers = await asyncio.gather(*map(status, self.members))
        return {
            member.endpoint: answer for member, answer in zip(self.members, answers, strict=True) if answer is not None
        }

    async def aclose(self) -> None:
        self._closed = True
        if self._learning is not None:
            self._learning.cancel()
            await asyncio.gather(self._learning, return_exceptions=True)
        await asyncio.gather(*[member.channel.close() for member in self.members])


def refusal_of(release: str) -> str | None:
    """Why a release of etcd can't be used."""
    if release in _BAD_RELEASES:
        return ", which can lose data: upgrade it to 3.5.3 or later"
    numbers = tuple(int(number) for number in release.split(".")[:2] if number.isdecimal())
    return None if numbers >= _OLDEST_RELEASE else ": Keyloft needs 3.4, or 3.5.3 and later"


def _is_loopback(host: str) -> bool:
    """Whether an address means the machine on which it is used."""
    try:
        address = ip_address(host.strip("[]"))
    except ValueError:
        return host == "localhost"
    return address.is_loopback or address.is_unspecified


def _credentials(address: EtcdAddress) -> Any:
    def content(option: str, file: str | None) -> bytes | None:
        try:
            return None if file is None else Path(file).read_bytes()
        except OSError as error:
            raise CannotOpen(f"{address.name}: {option}={file} can't be read: {error.strerror}") from None

    contents = content("ca", address.ca), content("key", address.key), content("cert", address.cert)
    _check_certificates(address)
    return grpc.ssl_channel_credentials(*contents)


def _check_certificates(address: EtcdAddress) -> None:
    """Refuse files that gRPC can't use: it would only say that no member can be connected to."""
    trial = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if address.ca is not None:
        try:
            trial.load_verify_locations(address.ca)
        except ssl.SSLError:
            raise CannotOpen(f"{address.name}: ca={address.ca} holds no certificates in PEM form") from None
    if address.cert is not None:
        try:
            trial.load_cert_chain(address.cert, address.key, password="")
        except ssl.SSLError:
            raise CannotOpen(
                f"{address.name}: cert={address.cert} and key={address.key} are not a certificate and its private "
                "key, both in PEM form, the key without a password"
            ) from None
