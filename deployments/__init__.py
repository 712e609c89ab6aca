"""What runs where: deployments, their bootstrap, and a stack for one machine."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEMO = "smollm2-demo"
POOLS = {
    "cpu": "Orchestration: pipelines, on any machine that reaches the server.",
    "gpu": "The work: one worker on each host that holds data and GPUs.",
}
