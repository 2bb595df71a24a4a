# The image of docs/fleet/kubernetes-*.yaml: docker build -t kvq . It was never built; a test reads it.
FROM python:3.11-slim
# Triton compiles its launchers with a C compiler
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
WORKDIR /kvq
COPY pyproject.toml constraints.txt README.md LICENSE NOTICE flows.yaml ./
COPY kvq_runtime kvq_runtime
COPY kvq_calib kvq_calib
COPY pipelines pipelines
COPY artifacts artifacts
RUN pip install --no-cache-dir -c constraints.txt -e '.[flows]'
RUN useradd --create-home kvq
USER kvq
ENV KVQ_CHECKOUT=/kvq
CMD ["prefect", "worker", "start", "--pool", "kvq-gpu", "--type", "process"]
