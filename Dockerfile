# syntax=docker/dockerfile:1
# The orchestrator / worker image: server, workers and the reference engine on a CPU. GPU hosts run
# the same package in an environment of their own (docs/gpu-host.md).
FROM python:3.11-slim-bookworm

ENV PYTHONUNBUFFERED=1 \
    PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    DO_NOT_TRACK=1 \
    PREFECT_SERVER_ANALYTICS_ENABLED=false

RUN useradd --create-home --uid 1000 draftworks
WORKDIR /opt/draftworks

# Dependencies first: they change rarely, the source often.
COPY constraints.txt pyproject.toml README.md ./
COPY draftworks/__init__.py draftworks/__init__.py
RUN python -m venv /opt/venv \
 && /opt/venv/bin/python -m pip install --constraint constraints.txt '.[orchestrator,gpu,demo]' \
 && /opt/venv/bin/python -m pip uninstall --yes draftworks
ENV PATH=/opt/venv/bin:$PATH

COPY draftworks draftworks
COPY flows flows
COPY tasks tasks
COPY blocks blocks
COPY deployments deployments
RUN python -m pip install --no-deps --editable . \
 && install --directory --owner draftworks /data

USER 1000
ENV DRAFTWORKS_CACHE=/data/cache DRAFTWORKS_ROOT=/opt/draftworks
VOLUME /data

# Override with `prefect server start`, or another pool.
CMD ["prefect", "worker", "start", "--pool", "cpu"]
