# wfm_ds for CUDA: docker build -t wfm_ds . && docker run --gpus all --ipc=host -v /data:/data wfm_ds wfm doctor
# --ipc=host: NCCL and data workers share memory between processes and need more than Docker's default of 64 MiB.
# The devel image contains nvcc, which Triton and DeepSpeed need to compile. For another CUDA version change both arguments.
ARG CUDA=12.8.1
FROM nvidia/cuda:${CUDA}-cudnn-devel-ubuntu24.04
ARG TORCH_INDEX=https://download.pytorch.org/whl/cu128
ENV DEBIAN_FRONTEND=noninteractive PIP_NO_CACHE_DIR=1 PYTHONUNBUFFERED=1 DS_BUILD_OPS=0
RUN apt-get update \
    && apt-get install -y --no-install-recommends python3 python3-dev python3-venv git openssh-client pdsh \
    && rm -rf /var/lib/apt/lists/* \
    && python3 -m venv /opt/venv
ENV PATH=/opt/venv/bin:$PATH
RUN pip install torch --index-url ${TORCH_INDEX}
WORKDIR /opt/wfm_ds
COPY . .
ARG EXTRAS=reward-ocr,reward-http,s3,datasets
RUN pip install ".[${EXTRAS}]"
WORKDIR /workspace
CMD ["wfm", "--help"]
