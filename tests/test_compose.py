"""compose.yaml hangs together: it is read here, not run."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from taskmesh.testing.servers import free_port

ROOT = Path(__file__).parents[1]
NODES = [f"redis-{number}" for number in range(1, 7)]
PROGRAMS = {
    "master": "workers.master",
    "standby": "workers.master",
    "gradient": "workers.gradient",
    "scoring": "workers.scoring",
}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return loaded


@pytest.fixture(scope="module")
def services(compose: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = compose["services"]
    return found


def test_the_services(services: dict[str, Any]) -> None:
    assert set(services) == {*NODES, "cluster", *PROGRAMS}


def test_the_cluster_is_formed_from_healthy_nodes(services: dict[str, Any]) -> None:
    step = services["cluster"]
    assert step["depends_on"] == {node: {"condition": "service_healthy"} for node in NODES}
    assert all("healthcheck" in services[node] for node in NODES)
    script = step["command"][-1]
    assert "--cluster create" in script and "--cluster-replicas 1" in script
    addresses = [services[node]["networks"]["mesh"]["ipv4_address"] for node in NODES]
    assert f'"{" ".join(addresses)}"' in script
    assert len(set(addresses)) == len(NODES)


def test_the_script_is_a_script(services: dict[str, Any]) -> None:
    script = services["cluster"]["command"][-1].replace("$$", "$")
    assert subprocess.run(["sh", "-n", "-c", script]).returncode == 0


@pytest.mark.parametrize(("service", "program"), PROGRAMS.items())
def test_the_programs(services: dict[str, Any], service: str, program: str) -> None:
    described = services[service]
    assert described["command"] == [program]
    assert Path(ROOT, *program.split(".")).with_suffix(".py").exists()
    assert described["depends_on"] == {"cluster": {"condition": "service_completed_successfully"}}
    assert Path(ROOT, described["build"]["dockerfile"]).exists()


def test_every_variable_is_read(services: dict[str, Any]) -> None:
    readers = [ROOT / "taskmesh" / "settings.py", *(ROOT / "workers").glob("*.py")]
    read = {name for path in readers for name in re.findall(r'"(TASKMESH_[A-Z_]+)"', path.read_text())}
    for service in PROGRAMS:
        assert set(services[service]["environment"]) <= read
    for service in (*NODES, "cluster"):
        assert set(services[service]["environment"]) == {"REDISCLI_AUTH"}


def test_volumes_networks_and_configs_are_declared(compose: dict[str, Any], services: dict[str, Any]) -> None:
    used = {volume.partition(":")[0] for node in NODES for volume in services[node]["volumes"]}
    assert used == set(compose["volumes"]) and len(used) == len(NODES)
    assert {name for service in services.values() for name in service["networks"]} == set(compose["networks"])
    assert {config["source"] for node in NODES for config in services[node]["configs"]} == set(
        compose["configs"]
    )


def test_images_are_pinned(services: dict[str, Any]) -> None:
    for name, service in services.items():
        _, colon, tag = service["image"].rpartition(":")
        assert colon and tag and tag != "latest", name
    bases = re.findall(r"^FROM (\S+)", (ROOT / "workers" / "Dockerfile").read_text(), re.MULTILINE)
    assert bases and all(":" in base and not base.endswith(":latest") for base in bases)


def test_one_port_on_loopback(services: dict[str, Any]) -> None:
    ports = [port for service in services.values() for port in service.get("ports", [])]
    assert len(ports) == 1 and ports[0].startswith("127.0.0.1:")


def test_no_password_is_written_down(compose: dict[str, Any]) -> None:
    text = (ROOT / "compose.yaml").read_text()
    assert "${REDIS_PASSWORD:?" in text
    assert set(re.findall(r'(?:requirepass|masterauth) "(.*)"', text)) == {"${REDIS_PASSWORD}"}


def test_the_nodes_form_a_cluster(compose: dict[str, Any], services: dict[str, Any], tmp_path: Path) -> None:
    """The configuration and the creation step as they are written, on loopback addresses instead of containers'."""
    if shutil.which("redis-cli") is None:
        pytest.skip("redis-cli is not here")
    port = free_port()
    addresses = [
        services[node]["networks"]["mesh"]["ipv4_address"].replace("172.30.", "127.30.") for node in NODES
    ]
    script = services["cluster"]["command"][-1].replace("$$", "$").replace("172.30.", "127.30.")
    script = script.replace(":6379", f":{port}").replace("redis-cli", f"redis-cli -p {port}")
    script = script.replace("-h redis-1", f"-h {addresses[0]}")
    with ExitStack() as stack:
        for address in addresses:
            folder = tmp_path / address
            folder.mkdir()
            settings = compose["configs"]["redis"]["content"].replace("${REDIS_PASSWORD}", "right")
            (folder / "redis.conf").write_text(settings.replace("/data", str(folder)))
            process = subprocess.Popen(
                [
                    "redis-server",
                    folder / "redis.conf",
                    "--bind",
                    address,
                    "--port",
                    str(port),
                    "--bind-source-addr",
                    address,
                ],
                stdout=subprocess.DEVNULL,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
        for address in addresses:
            with redis.Redis(
                address, port, password="right", retry=Retry(ConstantBackoff(0.1), 100)
            ) as client:
                client.ping()
        for _ in range(2):  # the second time there is nothing to do
            done = subprocess.run(
                ["sh", "-ec", script],
                env={**os.environ, "REDISCLI_AUTH": "right"},
                capture_output=True,
                text=True,
                timeout=60,
            )
            assert done.returncode == 0, done.stdout + done.stderr
        with redis.Redis(addresses[0], port, password="right") as client:
            state = client.execute_command("CLUSTER INFO")
            assert (state["cluster_size"], state["cluster_known_nodes"]) == ("3", "6")
            assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}
