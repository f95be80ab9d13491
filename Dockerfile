# syntax=docker/dockerfile:1
FROM python:3.11-slim-bookworm AS build
WORKDIR /src
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.11-slim-bookworm
LABEL org.opencontainers.image.title="phasewise" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.description="Where the time of each LLM request goes, which resource bounds it, and which change acts on it"
ENV PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 PHASEWISE_DATA=/data
COPY requirements.lock /tmp/requirements.lock
# The lock also pins the tools of the check; as constraints it only fixes what the wheel itself asks for.
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    pip install --no-cache-dir --constraint /tmp/requirements.lock /wheels/phasewise-*.whl \
 && rm /tmp/requirements.lock \
 && useradd --system --uid 10001 --home-dir /data --shell /usr/sbin/nologin phasewise \
 && install -d -o phasewise -g phasewise /data
USER 10001
VOLUME /data
EXPOSE 8080 4317 4318
STOPSIGNAL SIGTERM
# The image has no curl; doctor asks the running server.
HEALTHCHECK --interval=10s --timeout=8s --start-period=60s --retries=3 CMD ["phasewise", "doctor", "--quick"]
ENTRYPOINT ["phasewise"]
# Inside a container the port is reached only through what the host publishes: publish it on loopback, or make keys first
# (docker run ... keys create), from which on --insecure-no-auth changes nothing.
CMD ["serve", "--host", "0.0.0.0", "--insecure-no-auth"]
