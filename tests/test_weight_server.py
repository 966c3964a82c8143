"""The learner's weight server, over real sockets."""

import time
import zlib

import msgpack
import numpy as np
import pytest
import torch
import zmq

from buffer.codec import decode
from buffer.schema import WeightsManifest
from learner.weights import PEER_WINDOW, WeightServer, manifest_checksum, pack

TENSORS = {
    "a": torch.arange(100, dtype=torch.float32).reshape(10, 10),
    "b": torch.tensor([1.5], dtype=torch.bfloat16),
    "c": torch.arange(7, dtype=torch.int64),
    "scalar": torch.tensor(3.0),
}


def packed(lineage=1, version=0, **settings):
    return pack(TENSORS.items(), lineage=lineage, version=version, **({"bucket_bytes": 256} | settings))


@pytest.fixture
def server():
    server = WeightServer()
    yield server
    server.close()
    assert server.failure is None


class Peer:
    def __init__(self, server):
        self.socket = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.connect(server.endpoint)

    def send(self, *request):
        self.socket.send(msgpack.packb(request))

    def receive(self, timeout_s=5.0):
        assert self.socket.poll(int(timeout_s * 1000)), "no answer"
        head, *raw = self.socket.recv_multipart()
        return [*msgpack.unpackb(head), *raw]

    def ask(self, *request):
        self.send(*request)
        return self.receive()


@pytest.fixture
def peer(server):
    peer = Peer(server)
    yield peer
    peer.socket.close()


def unpack_tensor(spec, data):
    raw = data[spec.offset : spec.offset + spec.num_bytes]
    dtype = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "I64": torch.int64}[spec.dtype]
    return torch.frombuffer(bytearray(raw), dtype=dtype).reshape(spec.shape)


@pytest.mark.parametrize("bucket_bytes", [64, 100, 256, 10**6])
def test_buckets_hold_each_tensor_bit_for_bit(bucket_bytes):
    version = packed(bucket_bytes=bucket_bytes)
    manifest = version.manifest
    data = b"".join(version.buckets)
    assert manifest.bucket_bytes == tuple(len(bucket) for bucket in version.buckets)
    assert max(manifest.bucket_bytes) <= bucket_bytes
    assert manifest.bucket_crc32 == tuple(zlib.crc32(bucket) for bucket in version.buckets)
    assert manifest.checksum == manifest_checksum(manifest.bucket_crc32)
    assert [spec.name for spec in manifest.tensors] == list(TENSORS)
    for spec in manifest.tensors:
        assert spec.offset % 64 == 0
        assert torch.equal(unpack_tensor(spec, data), TENSORS[spec.name])


def test_floating_weights_are_published_in_the_engines_dtype():
    version = packed(dtype=torch.bfloat16, bucket_bytes=10**6)
    specs = {spec.name: spec for spec in version.manifest.tensors}
    assert [specs[name].dtype for name in TENSORS] == ["BF16", "BF16", "I64", "BF16"]
    assert torch.equal(unpack_tensor(specs["a"], b"".join(version.buckets)), TENSORS["a"].to(torch.bfloat16))


def test_a_joiner_gets_the_newest_version_whole(server, peer):
    server.publish(packed(lineage=3, version=7))
    kind, record = peer.ask("latest", -1, -1, 5.0)
    assert kind == "manifest"
    manifest = decode(WeightsManifest, msgpack.packb(record))
    assert (manifest.lineage, manifest.version) == (3, 7)
    answers = [peer.ask("bucket", 3, 7, index) for index in range(len(manifest.bucket_bytes))]
    assert [answer[:2] for answer in answers] == [["bucket", index] for index in range(len(answers))]
    data = b"".join(answer[2] for answer in answers)
    assert [zlib.crc32(answer[2]) for answer in answers] == list(manifest.bucket_crc32)
    assert torch.equal(unpack_tensor(manifest.tensors[0], data), TENSORS["a"])
    peer.ask("latest", 3, 7, 0.0)  # the server has counted the bucket when it answers what came after it
    assert server.counts["bytes_sent"] == len(data)


def test_a_waiting_engine_hears_of_a_version_when_it_is_published(server, peer):
    server.publish(packed(lineage=1, version=4))
    peer.send("latest", 1, 4, 30.0)
    assert not peer.socket.poll(100), "nothing newer yet"
    server.publish(packed(lineage=1, version=5))
    assert peer.receive()[1][:2] == [1, 5]


@pytest.mark.parametrize(
    ("lineage", "version", "answer"),
    [(2, 5, "none"), (1, 5, "manifest"), (9, 4, "manifest"), (1, 6, "none"), (3, 5, "none")],
)
def test_newer_is_a_higher_version_or_the_same_of_a_higher_lineage(server, peer, lineage, version, answer):
    server.publish(packed(lineage=2, version=5))
    assert peer.ask("latest", lineage, version, 0)[0] == answer


def test_a_wait_ends_at_its_time(server, peer):
    started_s = time.monotonic()
    assert peer.ask("latest", -1, -1, 0.2) == ["none"]
    assert 0.15 < time.monotonic() - started_s < 3


@pytest.mark.parametrize("request_", [(1, 0, 0), (2, 1, 0), (1, 1, 99), (1, 1, -1)])
def test_a_bucket_of_another_version_is_gone(server, peer, request_):
    server.publish(packed(lineage=1, version=1))
    assert peer.ask("bucket", *request_) == ["gone"]


def test_a_bucket_before_any_publication_is_gone(server, peer):
    assert peer.ask("bucket", 1, 1, 0) == ["gone"]


MALFORMED = [
    b"",
    b"\xc1",
    msgpack.packb(7),
    msgpack.packb(["latest"]),
    msgpack.packb(["latest", 1, "1", 0]),
    msgpack.packb(["latest", 1, 1, float("nan")]),
    msgpack.packb(["bucket", 1, 1, 0.5]),
    msgpack.packb(["bucket", True, 1, 0]),
    msgpack.packb(["else", 1, 1, 0]),
    msgpack.packb([["latest"], 1, 1, 0]),
]


def test_what_is_no_request_is_counted_and_harms_nobody(server, peer):
    for frame in MALFORMED:
        peer.socket.send(frame)
    peer.socket.send_multipart([msgpack.packb(["latest", 1, 1, 0])] * 2)
    assert peer.ask("latest", -1, -1, 0) == ["none"]
    assert server.counts["malformed"] == len(MALFORMED) + 1


def test_a_peer_that_never_reads_costs_no_memory_and_delays_no_other(server, peer):
    big = pack([("a", torch.zeros(1 << 20))], lineage=1, version=1, bucket_bytes=1 << 22)
    server.publish(big)
    deaf = Peer(server)
    deaf.socket.setsockopt(zmq.RCVHWM, 1)
    try:
        for _ in range(20 * PEER_WINDOW):
            deaf.send("bucket", 1, 1, 0)
        assert peer.ask("bucket", 1, 1, 0)[:2] == ["bucket", 0]
        deadline_s = time.monotonic() + 10
        while server.counts["requests"] < 20 * PEER_WINDOW + 1 and time.monotonic() < deadline_s:
            peer.ask("latest", 1, 1, 0.05)
        assert server.counts["undelivered"] > 0
    finally:
        deaf.socket.close()


def test_pack_copies_so_that_training_may_go_on():
    tensor = torch.zeros(4)
    version = pack([("a", tensor)], lineage=1, version=1, bucket_bytes=64)
    tensor += 1
    np.testing.assert_array_equal(np.frombuffer(version.buckets[0], np.float32), np.zeros(4))


def test_a_limit_on_the_rate_holds_buckets_back_and_no_close():
    server = WeightServer(max_mib_per_s=0.001)
    peer = Peer(server)
    try:
        server.publish(packed())
        begun_s = time.monotonic()
        assert peer.ask("latest", 0, -1, 5.0)[0] == "manifest"
        assert time.monotonic() - begun_s < 0.2
        assert peer.ask("bucket", 1, 0, 0)[0] == "bucket"
        assert time.monotonic() - begun_s > 256 / (0.001 * 2**20)
        server.publish(packed(version=1, bucket_bytes=1 << 20))
        peer.send("bucket", 1, 1, 0)
        begun_s = time.monotonic()
    finally:
        server.close()
        peer.socket.close()
    assert time.monotonic() - begun_s < 0.4
    assert server.failure is None
