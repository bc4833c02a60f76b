# The course in a container: JupyterLab on port 8888.
#   docker build -t ladder .                               CPU
#   docker build -t ladder-cuda --build-arg VARIANT=cuda . for NVIDIA GPUs
FROM python:3.12-slim

# cpu or cuda: which build of PyTorch. The CUDA build brings its own CUDA libraries, so both start
# from the same image, and the driver comes from the host.
ARG VARIANT=cpu

# g++ is for torch.compile and Triton, which compile small C files.
RUN apt-get update \
    && apt-get install -y --no-install-recommends git g++ make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /course

# What is installed depends on these alone, so that a changed lesson installs nothing again.
COPY requirements.txt Makefile ./
COPY lessons/toolbox/setup.sh lessons/toolbox/setup.sh
RUN case "$VARIANT" in \
        cpu) make setup TORCH_INDEX=https://download.pytorch.org/whl/cpu ;; \
        cuda) make setup ;; \
        *) echo "VARIANT: got $VARIANT; accepted: cpu, cuda" >&2; exit 1 ;; \
    esac

COPY . .

# What a container may use of the host's driver, if it is started with --gpus.
ENV NVIDIA_DRIVER_CAPABILITIES=compute,utility
EXPOSE 8888
CMD ["make", "lab", "LAB=--ip 0.0.0.0 --no-browser"]
