# AutoDist on a CPU, for containers that a scheduler starts: examples/compose.yaml and examples/jobset.yaml.
#
#     docker build -t autodist .
#
# The wheel is made in an image of its own, so that the one that trains has neither the sources nor a compiler.
FROM python:3.11-slim AS wheel
WORKDIR /sources
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim
# `--build-arg EXTRAS=[gpu]` brings CUDA's libraries, too.
ARG EXTRAS=
RUN --mount=type=bind,from=wheel,source=/wheels,target=/wheels \
    pip install --no-cache-dir "$(echo /wheels/autodist_tf-*.whl)${EXTRAS}"
RUN useradd --uid 1000 --create-home trainer
USER 1000
WORKDIR /home/trainer
COPY --chown=1000 examples examples
ENV TF_CPP_MIN_LOG_LEVEL=2
CMD ["autodist", "--help"]
