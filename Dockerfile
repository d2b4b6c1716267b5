# An image that trains. CPU:  docker build -t xscale .
# CUDA (torch is the base's):  docker build -t xscale --build-arg BASE=nvcr.io/nvidia/pytorch:26.01-py3 .
ARG BASE=python:3.12-slim
FROM ${BASE}
# DeepSpeed compiles an optimizer at its first use. The aligner eflomal has another licence (GPL-3): who wants it
# installs it with `pip install eflomal`.
RUN apt-get update -qq \
    && DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends g++ make python3-dev \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/xscale
COPY . .
# Where the base has torch, it stays; else constraints.txt names the one to install.
RUN if python3 -c "import torch" 2> /dev/null; then grep -vE "^(torch|triton|numpy)==" constraints.txt > /tmp/constraints.txt; \
    else cp constraints.txt /tmp/constraints.txt; fi \
    && python3 -m pip install --no-cache-dir -c /tmp/constraints.txt '.[eval]'
ENV TOKENIZERS_PARALLELISM=false
# Runs are written below /home/xscale, or into a folder that is mounted.
RUN useradd --create-home xscale
USER xscale
WORKDIR /home/xscale
CMD ["ds_report"]
