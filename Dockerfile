# bedplate without engines: the gateway of a platform, and the command line. Engines have images of their own.
#   docker build -t bedplate . && docker run --rm --read-only --tmpfs /tmp -v state:/state bedplate probe
# It runs as user 1000 and writes to /state and /tmp only.
ARG PYTHON=python:3.12-slim-bookworm
FROM ${PYTHON} AS build
COPY pyproject.toml README.md LICENSE /src/
COPY src /src/src
RUN python3 -m venv /opt/bedplate
RUN /opt/bedplate/bin/python -m pip install --no-cache-dir --disable-pip-version-check "/src[postgresql]"

FROM ${PYTHON}
COPY --from=build /opt/bedplate /opt/bedplate
RUN install -d -m 0700 -o 1000 -g 1000 /state
ENV PATH=/opt/bedplate/bin:/usr/local/bin:/usr/bin:/bin
ENV BEDPLATE_HOME=/state
ENV HOME=/state
ENV PYTHONDONTWRITEBYTECODE=1
WORKDIR /state
USER 1000:1000
VOLUME /state
EXPOSE 8080
ENTRYPOINT ["bedplate"]
CMD ["--help"]
