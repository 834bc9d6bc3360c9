# A training image for NVIDIA GPUs. Build: docker build -t dlrmv4 .
# Run: docker run --gpus all --ipc=host -e DLRM_DATA_PATH=/data -v /path/to/store:/data -v /path/to/results:/app/results dlrmv4
FROM python:3.12-slim-bookworm

# Triton compiles its launchers with the host's C compiler; CUDA itself comes with requirements/cuda.txt, the driver from the host.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
ENV NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility PYTHONUNBUFFERED=1

# The locks first: a change of the code does not install them again.
WORKDIR /app
COPY requirements/ requirements/
RUN pip install --no-cache-dir --no-deps -r requirements/cuda.txt

RUN useradd --create-home --uid 1000 trainer && mkdir results && chown trainer results
COPY . .
USER trainer

# One process a GPU; what follows the image's name replaces the arguments of train.py: docker run ... dlrmv4 --gin_file configs/demo.gin
ENTRYPOINT ["torchrun", "--nproc_per_node=gpu", "train.py"]
CMD ["--gin_file", "configs/yambda_5b.gin"]
