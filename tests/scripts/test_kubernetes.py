"""Manifests for Kubernetes: valid by its own schemas, and what they name exists."""

from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from jaxserve.api.config import EngineConfig
from jaxserve.cli.parser import build_parser
from jaxserve.routing.config import RouterConfig

FOLDER = Path(__file__).parents[2] / "scripts" / "kubernetes"
KEDA = "keda.sh/"
SCALED_OBJECT = {  # after KEDA's definition of its resource
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "spec": {
            "type": "object",
            "required": ["scaleTargetRef", "triggers"],
            "additionalProperties": False,
            "properties": {
                "scaleTargetRef": {"type": "object", "required": ["name"]},
                **{
                    name: {"type": "integer", "minimum": 0}
                    for name in ("minReplicaCount", "maxReplicaCount", "pollingInterval", "cooldownPeriod")
                },
                "triggers": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "required": ["type", "metadata"],
                        "properties": {
                            "type": {"const": "prometheus"},
                            "metricType": {"enum": ["AverageValue", "Value"]},
                            "metadata": {
                                "type": "object",
                                "required": ["serverAddress", "query", "threshold"],
                                "additionalProperties": {"type": "string"},
                            },
                        },
                    },
                },
            },
        }
    },
}


def manifests() -> list[Any]:
    """Return all resources."""
    return [each for file in sorted(FOLDER.glob("*.yaml")) for each in yaml.safe_load_all(file.read_text())]


def named(resource: Any) -> str:
    return f"{resource['kind']} {resource['metadata']['name']}"


@pytest.mark.parametrize("resource", manifests(), ids=named)
def test_resources_follow_the_schemas(resource: Any) -> None:
    if resource["apiVersion"].startswith(KEDA):
        jsonschema.validate(resource, SCALED_OBJECT)
    else:
        kubernetes_validate.validate(resource, "1.37", strict=True)


def test_commands_are_ours_and_the_router_knows_all_servers() -> None:
    resources = {named(each): each for each in manifests()}
    templates = [each["spec"].get("template", {}).get("spec", {}) for each in resources.values()]
    containers = [each for template in templates for each in template.get("containers", ())]
    commands = [build_parser().parse_args(each["args"]) for each in containers if each["image"] == "jaxserve"]
    (router,) = [args for args in commands if hasattr(args, "replicas")]
    assert RouterConfig(replicas=router.replicas)
    most = {"jaxserve": resources["ScaledObject jaxserve"]["spec"]["maxReplicaCount"], "jaxserve-producer": 1}
    expected = {f"http://{name}-{index}.jaxserve:8000" for name, count in most.items() for index in range(count)}
    assert {*router.replicas} == expected
    stores = [arg.partition("=")[2] for each in containers for arg in each["args"] if arg.startswith("--kv-store=")]
    assert len(stores) == len(commands) - 1 == 2
    assert len({EngineConfig(kv_store=store).store for store in stores}) == 1
