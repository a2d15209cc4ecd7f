# Targets:
#   cpu    the default: every Quire process, with the built-in model inside
#   cuda   the same and what Triton needs to compile its kernels, for workers on NVIDIA GPUs
#   front  the HTTP balancer of compose.yaml
#
# Written for BuildKit and the classic builder alike, so it uses no RUN --mount. The classic builder builds all stages
# above its target, hence the order: small ones first, each target above the ones that need more.

ARG PYTHON_IMAGE=python:3.11-slim-bookworm

FROM ${PYTHON_IMAGE} AS base
RUN apt-get update \
 && apt-get install --yes --no-install-recommends tini \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 10001 --no-create-home --home-dir /var/cache/quire --shell /usr/sbin/nologin quire

FROM base AS front
RUN apt-get update \
 && apt-get install --yes --no-install-recommends haproxy \
 && rm -rf /var/lib/apt/lists/*
COPY deploy/haproxy.cfg /etc/haproxy/haproxy.cfg
COPY deploy/probe.py /usr/local/lib/quire/probe.py
USER quire
EXPOSE 8000
# Lets open streams end, up to hard-stop-after; SIGTERM would cut them.
STOPSIGNAL SIGUSR1
HEALTHCHECK --timeout=5s --start-period=600s \
    CMD ["python3", "/usr/local/lib/quire/probe.py", "http://127.0.0.1:8000/ready"]
ENTRYPOINT ["tini", "--"]
CMD ["haproxy", "-W", "-db", "-f", "/etc/haproxy/haproxy.cfg"]

# Splits the requirements, so that a change of any other one leaves the layer with torch alone.
FROM base AS requirements
WORKDIR /requirements
COPY pyproject.toml ./
RUN python3 -c "import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['dependencies'], sep='\n')" > all.txt \
 && grep '^torch[^a-z]' all.txt > torch.txt

FROM base AS dependencies
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python3 -m venv /opt/quire
# A package index to take torch from instead of pip's default one, such as PyTorch's own index of CPU-only wheels, which
# are a tenth of the size.
ARG TORCH_INDEX_URL=
COPY --from=requirements /requirements/torch.txt /requirements/
RUN /opt/quire/bin/pip install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} -r /requirements/torch.txt
COPY --from=requirements /requirements/all.txt /requirements/
RUN /opt/quire/bin/pip install -r /requirements/all.txt

FROM dependencies AS package
RUN apt-get update \
 && apt-get install --yes --no-install-recommends g++ \
 && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY pyproject.toml README.md ./
COPY shared shared
COPY kernels kernels
COPY services services
# The CPU kernels for every instruction set: the image has no compiler, and each processor finds its own.
RUN /opt/quire/bin/python -m kernels.cpu \
 && /opt/quire/bin/pip wheel --no-deps --wheel-dir /dist .

FROM base AS cpu
# The cache is also the home of what other libraries keep: a volume there serves a container whose root is read-only.
ENV PATH=/opt/quire/bin:$PATH \
    HOME=/var/cache/quire \
    QUIRE_CACHE=/var/cache/quire \
    HF_HOME=/var/cache/quire/huggingface \
    TRITON_CACHE_DIR=/var/cache/quire/triton \
    PYTHONUNBUFFERED=1
# Made here so that named volumes mounted there begin with this owner.
RUN install -d -o quire -g quire -m 0700 /var/cache/quire /var/lib/quire
COPY --from=dependencies /opt/quire /opt/quire
COPY --from=package /dist /dist
RUN pip install --no-cache-dir --no-deps --no-index /dist/*.whl
COPY deploy/healthcheck.py deploy/probe.py /usr/local/lib/quire/
USER quire
WORKDIR /var/cache/quire
RUN quire fetch
EXPOSE 8000
HEALTHCHECK --timeout=10s --start-period=600s \
    CMD ["python", "/usr/local/lib/quire/healthcheck.py"]
ENTRYPOINT ["tini", "--", "quire"]
CMD ["serve", "--host", "0.0.0.0"]

FROM cpu AS cuda
USER root
# Triton compiles a small C stub for each kernel at run time.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
USER quire
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility

FROM cpu
