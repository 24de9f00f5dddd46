"""What strangers without the token and impostors who have it send to the ports of a feed and of the coordinator."""

from __future__ import annotations

import contextlib
import random
import socket
from collections import Counter
from collections.abc import Callable, Sequence

import grpc

from hetero._proto import control_pb2 as control
from hetero._proto import feed_pb2 as feed
from hetero._proto import splits_pb2 as splits
from hetero.door import TOKEN_KEY

DEADLINE_S = 30.0
HOST, LOOPBACK, TOKEN = "data-1", "127.0.0.1", "secret"
ATTACKERS = 3  # threads; those that have the token pose as ranks 1, 2 and 3, one each
RANKS = 1 + ATTACKERS
FEED, COORDINATOR, LANE = "feed", "coordinator", "lane"  # the feed's other port, where no call can be made
READ, SERVE, FOLLOW = "/hetero.v1.Feed/Read", "/hetero.v1.Splits/Serve", "/hetero.v1.Splits/Follow"
CONTROL = "/hetero.v1.Control/"
READING = ("GetStatus", "/hetero.v1.Splits/GetInput")  # answer whatever the request says
ASKING = ("Register", "Heartbeat", "Publish", "EndTraining", "ReportFailure", "Leave", "Watch")
METHODS = {
    FEED: (READ,),
    COORDINATOR: (SERVE, FOLLOW, READING[1], *(CONTROL + name for name in ("GetStatus", *ASKING))),
}
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
SETTINGS = b"\0\0\0\x04\0\0\0\0\0"
MOST_BYTES = {FEED: 1 << 20, COORDINATOR: 16 << 20}
LONG = 20_000  # characters: more than fits into the header that tells of an error
HUGE, VAST = 2**63 - 1, 2**31 - 1  # the greatest int64 and int32


class Attacker:
    """Sends what it is told to, one request after the other, and notes what comes back.

    Args:
        number: 0, 1, ...; the seed of what it sends. With the token it is rank `number` + 1.
        run_id: Of the job.
        ports: Where the feed, its lane and the coordinator listen.
    """

    def __init__(self, number: int, run_id: str, ports: dict[str, int]) -> None:
        self.rng, self.rank, self.run_id, self.ports = random.Random(number), number + 1, run_id, ports
        self.seen: Counter[tuple[str, str, str]] = Counter()  # kind, where, what came back
        self.error: BaseException | None = None
        options = (("grpc.use_local_subchannel_pool", 1), ("grpc.max_send_message_length", -1))
        self._channels = {
            where: grpc.insecure_channel(f"{LOOPBACK}:{port}", options)
            for where, port in ports.items()
            if where != LANE
        }

    def attack(self, kinds: Sequence[tuple[str, str]]) -> None:
        """Do all of these: (kind, where)."""
        try:
            for kind, where in kinds:
                self.seen[kind, where, KINDS[kind][0](self, where)] += 1
        except BaseException as error:
            self.error = error

    def close(self) -> None:
        for channel in self._channels.values():
            channel.close()

    # --- how it speaks ------------------------------------------------------------------------------------------------

    def knock(self, where: str, payload: bytes) -> str:
        """Send bytes and wait until the server hangs up."""
        with socket.create_connection((LOOPBACK, self.ports[where]), DEADLINE_S) as stranger:
            with contextlib.suppress(ConnectionError, OSError):
                stranger.sendall(payload)
                stranger.shutdown(socket.SHUT_WR)
            try:
                while stranger.recv(65536):
                    pass
            except ConnectionError:
                pass
            except TimeoutError:
                return "silence"
        return "hung up"

    def call(self, where: str, method: str, *requests: bytes, token: str | None = TOKEN) -> grpc.Call:
        metadata = () if token is None else ((TOKEN_KEY, token),)
        calling = self._channels[where].stream_stream(method)  # on the wire as a call of any other kind
        return calling(iter(requests), metadata=metadata, timeout=DEADLINE_S)

    def ask(self, where: str, method: str, *requests: bytes, token: str | None = TOKEN) -> str:
        """Call and return the name of the status."""
        try:
            for _ in self.call(where, method, *requests, token=token):
                pass
        except grpc.RpcError as error:
            return str(error.code().name)
        return "OK"

    def read_hello(self, **fields: object) -> bytes:
        """Return the first request of a stream from the feed, right but for what is given."""
        hello = {"rank": self.rank, "size": RANKS, "run_id": self.run_id, **fields}
        return feed.ReadRequest(hello=feed.ReadHello(**hello)).SerializeToString()

    def follow_hello(self, **fields: object) -> bytes:
        """Return the same of a stream to the split book."""
        hello = {"rank": self.rank, "size": RANKS, "run_id": self.run_id, **fields}
        return splits.FollowRequest(hello=splits.FollowHello(**hello)).SerializeToString()

    def say_hello(self, where: str, **fields: object) -> str:
        """Open a stream as a rank that is right but for what is given."""
        if where == FEED:
            return self.ask(FEED, READ, self.read_hello(**fields))
        return self.ask(COORDINATOR, FOLLOW, self.follow_hello(**fields))

    def read(self, *requests: feed.ReadRequest) -> str:
        """Say hello to the feed as a rank, and then this."""
        return self.ask(FEED, READ, self.read_hello(), *(request.SerializeToString() for request in requests))

    # --- what it does, by kind ----------------------------------------------------------------------------------------

    def random_bytes(self, where: str) -> str:
        return self.knock(where, self.rng.randbytes(self.rng.randrange(1, 4096)))

    def http1(self, where: str) -> str:
        verb = self.rng.choice(("GET /", "POST /hetero.v1.Feed/Read", "OPTIONS *", "CONNECT feed:1"))
        return self.knock(where, f"{verb} HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nsome body".encode())

    def cut_preface(self, where: str) -> str:
        return self.knock(where, PREFACE[: self.rng.randrange(len(PREFACE))])

    def garbage_frames(self, where: str) -> str:
        frames = (
            len(body).to_bytes(3, "big") + self.rng.randbytes(6) + body
            for body in (self.rng.randbytes(self.rng.randrange(64)) for _ in range(8))
        )
        return self.knock(where, PREFACE + SETTINGS + b"".join(frames))

    def cut_frames(self, where: str) -> str:
        size, kind = self.rng.choice((17, 16384, 2**24 - 1)), self.rng.randrange(10)
        head = size.to_bytes(3, "big") + bytes((kind, self.rng.randrange(256), 0, 0, 0, 1))
        return self.knock(where, PREFACE + SETTINGS + head + self.rng.randbytes(16))

    def port_scan(self, where: str) -> str:
        with socket.create_connection((LOOPBACK, self.ports[where]), DEADLINE_S) as scanner:
            if self.rng.random() < 0.5:  # leave with a reset instead of a goodbye
                scanner.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
        return "left"

    def no_token(self, where: str) -> str:
        return self.ask(where, self.rng.choice(METHODS[where]), self._right_hello(where), token=None)

    def wrong_token(self, where: str) -> str:
        token = self.rng.choice(("", "secre", "secrets", "x" * 2000, "%00", TOKEN.upper()))
        return self.ask(where, self.rng.choice(METHODS[where]), self._right_hello(where), token=token)

    def huge_metadata(self, where: str) -> str:
        return self.ask(where, self.rng.choice(METHODS[where]), token="x" * 100_000)

    def unknown_method(self, where: str) -> str:
        other = METHODS[COORDINATOR if where == FEED else FEED]
        method = self.rng.choice(
            (*other, "/", "/hetero.v1.Feed", "/hetero.v1.Feed/Write", "/a/b/c", "/hetero.v2.Control/Leave")
        )
        return self.ask(where, method, self.rng.randbytes(64))

    def garbage(self, where: str) -> str:
        method = self.rng.choice(
            [name for name in METHODS[where] if name.rpartition("/")[2] not in ("GetStatus", "GetInput")]
        )
        # A field that is longer than the message; before it, sometimes, one that nobody knows.
        unknown = b"\xfa\x07\x03abc" if self.rng.random() < 0.5 else b""
        return self.ask(
            where, method, unknown + b"\x0a\xff\xff\xff\xff\x07" + self.rng.randbytes(self.rng.randrange(2000))
        )

    def cut_short(self, where: str) -> str:
        hello = self._right_hello(where)
        return self.ask(where, READ if where == FEED else FOLLOW, hello[: self.rng.randrange(len(hello))])

    def oversized(self, where: str) -> str:
        return self.ask(where, self.rng.choice(METHODS[where]), bytes(MOST_BYTES[where] + self.rng.randrange(1, 1000)))

    def wrong_rank(self, where: str) -> str:
        return self.say_hello(where, rank=self.rng.choice((-1, RANKS, RANKS + 1, VAST, -VAST)))

    def wrong_size(self, where: str) -> str:
        return self.say_hello(where, size=self.rng.choice((0, -1, RANKS - 1, RANKS + 1, VAST)))

    def wrong_run(self, where: str) -> str:
        return self.say_hello(
            where, run_id=self.rng.choice(("", "run", self.run_id[:-1], self.run_id + "0", "x" * LONG))
        )

    def wrong_host(self, _: str) -> str:
        host = self.rng.choice(("", "data-2", "data-1 ", "DATA-1", "x" * LONG))
        if self.rng.random() < 0.5:
            hello = splits.ServeHello(host=host, feed_id="0")
            return self.ask(COORDINATOR, SERVE, splits.ServeRequest(hello=hello, wanted=HUGE).SerializeToString())
        name = self.rng.choice(ASKING[:-1])
        request = getattr(control, f"{name}Request")(host=host)
        if name in ("EndTraining", "ReportFailure"):
            request.cause_json = "{}"
        return self.ask(COORDINATOR, CONTROL + name, request.SerializeToString())

    def forbidden(self, _: str) -> str:
        return self.ask(
            COORDINATOR,
            *self.rng.choice(
                (
                    (f"{CONTROL}Register", control.RegisterRequest(host=HOST, role="x" * LONG).SerializeToString()),
                    (f"{CONTROL}Publish", control.PublishRequest(host=HOST).SerializeToString()),
                    (f"{CONTROL}Publish", control.PublishRequest(host=HOST, name="a" * LONG).SerializeToString()),
                    (f"{CONTROL}EndTraining", control.EndTrainingRequest(host=HOST, outcome=1).SerializeToString()),
                    (
                        f"{CONTROL}EndTraining",
                        control.EndTrainingRequest(host="trainer-1", outcome=99).SerializeToString(),
                    ),
                    (f"{CONTROL}ReportFailure", control.ReportFailureRequest(host=HOST).SerializeToString()),
                    (
                        f"{CONTROL}ReportFailure",
                        control.ReportFailureRequest(host=HOST, cause_json="[]").SerializeToString(),
                    ),
                )
            ),
        )

    def impossible_grant(self, _: str) -> str:
        grant = feed.Grant(epoch=0, window_bytes=HUGE, window_batches=HUGE, split=-1)
        field, value = self.rng.choice(
            [
                (name, sign * size)
                for name in ("consumed_bytes", "consumed_batches")
                for sign in (1, -1)
                for size in (1, HUGE)
            ]
            + [(name, -size) for name in ("epoch", "window_bytes", "window_batches") for size in (1, HUGE)]
        )
        setattr(grant, field, value)
        return self.read(feed.ReadRequest(grant=grant))

    def grant_of_nothing(self, _: str) -> str:
        epoch, split = self.rng.choice(((HUGE, -1), (10**12, 0), (0, HUGE), (0, -HUGE)))
        grant = feed.Grant(epoch=epoch, window_bytes=HUGE, window_batches=HUGE, split=split)
        return self.read(feed.ReadRequest(grant=grant))

    def false_ack(self, _: str) -> str:
        received = self.rng.choice((1, -1, 1000, HUGE, -HUGE))
        if self.rng.random() < 0.5:
            return self.read(feed.ReadRequest(received=received))
        reply = feed.ReadReply.FromString(next(iter(self.call(FEED, READ, self.read_hello()))))
        return self.say_hello(FEED, feed_id=reply.welcome.feed_id, received=received)

    def second_hello(self, _: str) -> str:
        return self.ask(FEED, READ, self.read_hello(), self.read_hello())

    def impossible_split(self, _: str) -> str:
        epoch, split, attempt = self.rng.choice(((-1, 0, 1), (0, -1, 1), (-HUGE, 0, 1), (0, 0, HUGE), (0, 0, -1)))
        key = splits.SplitId(epoch=epoch, split=split, attempt=attempt)
        fence = splits.Fence(epoch=0, attempt=self.rng.choice((HUGE, -1)), splits=[0])
        done = splits.SplitDone(id=key, batches=1)
        method, request = self.rng.choice(
            (
                (SERVE, splits.ServeRequest(hello=splits.ServeHello(host=HOST, held=[key]))),
                (SERVE, splits.ServeRequest(hello=splits.ServeHello(host=HOST, done=[done]))),
                (SERVE, splits.ServeRequest(hello=splits.ServeHello(host=HOST), returned=[key])),
                (FOLLOW, self._follow(highest_attempt=self.rng.choice((HUGE, -1)))),
                (FOLLOW, self._follow(obeyed=[fence])),
                (FOLLOW, self._follow(begun=[-1])),
                (FOLLOW, self._follow(left=[-HUGE])),
            )
        )
        return self.ask(COORDINATOR, method, request.SerializeToString())

    def abandoned(self, where: str) -> str:
        right = self._right_hello(where)
        method, *requests = self.rng.choice(
            ((READ, right), (READ,))
            if where == FEED
            else ((FOLLOW, right), (FOLLOW,), (SERVE,), (f"{CONTROL}Watch", b""))
        )
        call = self.call(where, method, *requests)
        if requests and self.rng.random() < 0.5:
            next(iter(call))
        call.cancel()
        return "left"

    def _follow(self, *, begun: Sequence[int] = (), left: Sequence[int] = (), **fields: object) -> splits.FollowRequest:
        request = splits.FollowRequest.FromString(self.follow_hello(**fields))
        request.begun.extend(begun)
        request.left.extend(left)
        return request

    def _right_hello(self, where: str) -> bytes:
        return self.read_hello() if where == FEED else self.follow_hello()


# What a kind is, where it is sent, what may come back, and how much of the attack it is.
REFUSED = {"INVALID_ARGUMENT", "NOT_FOUND", "FAILED_PRECONDITION", "PERMISSION_DENIED"}
BOTH = (FEED, COORDINATOR)
PORTS = (*BOTH, LANE)
KINDS: dict[str, tuple[Callable[[Attacker, str], str], Sequence[str], set[str], int]] = {
    "random bytes": (Attacker.random_bytes, PORTS, {"hung up"}, 4),
    "HTTP/1": (Attacker.http1, PORTS, {"hung up"}, 4),
    "a cut preface": (Attacker.cut_preface, PORTS, {"hung up"}, 4),
    "garbage frames": (Attacker.garbage_frames, PORTS, {"hung up"}, 4),
    "cut frames": (Attacker.cut_frames, PORTS, {"hung up"}, 4),
    "a port scan": (Attacker.port_scan, PORTS, {"left"}, 4),
    "no token": (Attacker.no_token, BOTH, {"UNAUTHENTICATED"}, 4),
    "a wrong token": (Attacker.wrong_token, BOTH, {"UNAUTHENTICATED"}, 4),
    "huge metadata": (Attacker.huge_metadata, BOTH, {"RESOURCE_EXHAUSTED"}, 1),
    "an unknown method": (Attacker.unknown_method, BOTH, {"UNIMPLEMENTED"}, 4),
    "garbage": (Attacker.garbage, BOTH, {"INVALID_ARGUMENT"}, 4),
    "cut short": (Attacker.cut_short, BOTH, REFUSED, 4),
    "too large": (Attacker.oversized, BOTH, {"RESOURCE_EXHAUSTED"}, 1),
    "a wrong rank": (Attacker.wrong_rank, BOTH, {"FAILED_PRECONDITION"}, 4),
    "a wrong size": (Attacker.wrong_size, BOTH, {"FAILED_PRECONDITION"}, 4),
    "a wrong run": (Attacker.wrong_run, BOTH, {"FAILED_PRECONDITION"}, 4),
    "a wrong host": (Attacker.wrong_host, (COORDINATOR,), {"NOT_FOUND"}, 4),
    "forbidden": (Attacker.forbidden, (COORDINATOR,), REFUSED, 4),
    "an impossible grant": (Attacker.impossible_grant, (FEED,), {"INVALID_ARGUMENT"}, 4),
    "a grant of nothing": (Attacker.grant_of_nothing, (FEED,), {"OK"}, 4),
    "a false ack": (Attacker.false_ack, (FEED,), {"INVALID_ARGUMENT"}, 4),
    "a second hello": (Attacker.second_hello, (FEED,), {"INVALID_ARGUMENT"}, 4),
    "an impossible split": (Attacker.impossible_split, (COORDINATOR,), {"INVALID_ARGUMENT"}, 4),
    "abandoned": (Attacker.abandoned, BOTH, {"left"}, 8),
}
