"""Configuration: the file, the flags over it, and what is refused by name."""

from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from pydantic import BaseModel

from pd_service.config import PlaneName, ServiceConfig, load_config
from pd_service.errors import ConfigError, EngineFailed, Overloaded, PdError, TransferFailed, from_code
from transfer.planes import PLANE_NAMES


def test_flags_override_the_file(tmp_path: Path) -> None:
    path = tmp_path / "service.yaml"
    path.write_text("pools: {prefill: {replicas: 3, kv_cache_bytes: 2GiB}}\ndtype: bfloat16\n")
    config = load_config(path, {"pools.prefill.replicas": 5, "gateway.http": "127.0.0.1:1"})
    assert (config.pools.prefill.replicas, config.pools.prefill.kv_cache_bytes) == (5, 2 * 2**30)
    assert (config.dtype, config.gateway.http, config.pools.decode.replicas) == ("bfloat16", "127.0.0.1:1", 1)


def test_an_empty_file_is_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "empty.yaml"
    path.write_text("# nothing\n")
    assert load_config(path, {}) == ServiceConfig()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("pools: {prefil: {}}", "pools.prefil: unknown field"),
        ("engine: {block_size: 0}", "engine.block_size"),
        ("engine: {planes: []}", "engine.planes"),
        ("engine: {planes: [rdma]}", "rdma"),
        ("dtype: float8", "'float8'"),
        ("pools: {decode: {replicas: -1}}", "pools.decode.replicas"),
        ("pools: {decode: {replicas: 3, max_replicas: 2}}", "pools.decode: replicas (3) must be from min_replicas (0)"),
        ("pools: {prefill: {min_replicas: 2}}", "to max_replicas (64)"),
        ("pools: {decode: {num_cpus: 0}}", "pools.decode: an engine needs num_cpus or resources above 0"),
        ("pools: {decode: {resources: {NPU: 0}}}", "pools.decode.resources.NPU"),
        ("supervision: {stall_s: 0}", "supervision.stall_s"),
        ("device: gpu", "'gpu'"),
        ("device: npu", "device 'npu' does not compute in dtype 'float32'; allowed: bfloat16"),
        ("{device: npu, dtype: bfloat16}", "device 'npu' needs engine.block_size 128 (given: 16)"),
        ("engine: {max_num_batched_tokens: 8}", "max_num_seqs"),
        ("- a list", "expected a mapping"),
        ("a: [", "cannot read"),
        ("pools: 3", "pools"),
    ],
)
def test_refusals_name_the_field_and_what_was_given(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "service.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refused:
        load_config(path, {"gateway.http": "127.0.0.1:1"})
    assert said in str(refused.value)


def test_a_service_on_npus_has_blocks_that_their_operators_take() -> None:
    config = ServiceConfig.model_validate({"device": "npu", "dtype": "bfloat16", "engine": {"block_size": 128}})
    assert config.engine_config("decode", Path("/model")).device == "npu"


def test_every_data_plane_can_be_configured() -> None:
    assert get_args(PlaneName) == PLANE_NAMES


def test_an_engine_gets_its_pools_settings() -> None:
    config = ServiceConfig.model_validate({"pools": {"decode": {"threads": 3, "kv_cache_bytes": "1MiB"}}})
    engine = config.engine_config("decode", Path("/model"))
    assert (engine.threads, engine.kv_cache_bytes, engine.role) == (3, 2**20, "decode")
    assert type(engine).model_validate(engine.model_dump(mode="json")) == engine  # it travels to another process


def test_errors_keep_their_class_over_the_wire() -> None:
    for error in (Overloaded("full"), TransferFailed("late")):
        again = from_code(type(error).__name__, str(error))
        assert (type(again), str(again)) == (type(error), str(error))
    assert type(from_code("SomethingNewer", "x")) is EngineFailed


def test_every_error_has_a_real_grpc_status() -> None:
    import grpc

    def tree(root: type[PdError]) -> list[type[PdError]]:
        return [root] + [kind for child in root.__subclasses__() for kind in tree(child)]

    assert len(tree(PdError)) > 10
    for kind in tree(PdError):
        assert kind.grpc_status in grpc.StatusCode.__members__
        assert 400 <= kind.http_code < 600


def test_the_deployed_file_names_every_setting_with_its_default() -> None:
    path = Path(__file__).parent.parent / "deploy" / "cluster-cpu.yaml"
    config = load_config(path, {})
    assert config == load_config(None, {})
    assert yaml.safe_load(path.read_text()).keys() == ServiceConfig.model_fields.keys()
    _assert_all_named(yaml.safe_load(path.read_text()), config)


def _assert_all_named(given: dict[str, Any], section: BaseModel) -> None:
    assert given.keys() == type(section).model_fields.keys()
    for name, value in given.items():
        if isinstance(inner := getattr(section, name), BaseModel):
            _assert_all_named(value, inner)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"engine.speculative.method": "magic"}, "engine.speculative.method: Input should be 'none', 'ngram' or 'mtp'"),
        ({"engine.speculative.num_tokens": 0}, "engine.speculative.num_tokens"),
        ({"engine.speculative.ngram_min": 5}, r"ngram_min \(5\) must not be more than ngram_max \(4\)"),
        ({"engine.max_preemptions": -1}, "engine.max_preemptions"),
    ],
)
def test_engine_settings_that_make_no_sense_are_refused_by_name(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        load_config(None, change)
