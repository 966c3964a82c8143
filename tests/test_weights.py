"""Versions on their way to an engine: staging, and what each kind of device needs."""

import os

from actors import platform
from actors.settings import RolloutSettings
from actors.weights import Staged
from buffer.schema import WeightsManifest


def test_a_staged_version_has_no_name_that_could_be_left_behind() -> None:
    before = set(os.listdir("/dev/shm"))
    manifest = WeightsManifest(lineage=1, version=2, bucket_bytes=(3, 4), bucket_crc32=(0, 0), tensors=(), checksum=0)
    with Staged.create(manifest) as staged:
        staged.write(1, b"defg")
        staged.write(0, memoryview(b"abc"))
        assert set(os.listdir("/dev/shm")) == before
        path = staged.path
        with open(path, "rb") as file:
            assert file.read() == b"abcdefg"
    assert not os.path.exists(path)


def test_the_plan_for_each_device_can_be_read_without_it() -> None:
    cpu = platform.environment("cpu", RolloutSettings(cpu_threads=3))
    assert cpu["OMP_NUM_THREADS"] == "3"
    assert cpu["TORCHDYNAMO_DISABLE"] == "1"
    rocm = platform.environment("rocm", RolloutSettings())
    assert rocm["VLLM_ROCM_USE_AITER"] == "0"
    assert "ROCR_VISIBLE_DEVICES" not in rocm
    assert "TORCHDYNAMO_DISABLE" not in rocm
    assert platform.engine_arguments("rocm", RolloutSettings()) == {}
    two = platform.engine_arguments("cpu", RolloutSettings(tensor_parallel=2, kv_cache_mib=8))
    assert two["distributed_executor_backend"] == "mp"
    assert two["kv_cache_memory_bytes"] == 8 << 20
    mine = {"OMP_NUM_THREADS": "7"}
    platform.apply(cpu, mine)
    assert mine["OMP_NUM_THREADS"] == "7"
