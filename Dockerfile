# A server of regard: docs/serve.md tells how to build and run it.
FROM python:3.11-slim AS build
WORKDIR /src
COPY pyproject.toml README.md LICENSE constraints.txt ./
COPY src ./src
# --build-arg TORCH="--index-url URL" takes torch from an index of builds for CPUs, which are a tenth of the size.
ARG TORCH=""
RUN python -m venv /opt/regard \
 && /opt/regard/bin/pip install --no-cache-dir $TORCH "$(grep '^torch==' constraints.txt)" \
 && /opt/regard/bin/pip install --no-cache-dir -c constraints.txt ".[serve]"

FROM python:3.11-slim
# Decoding compiles a C file on first use where there is a compiler; without one it runs on torch's own products.
RUN useradd --create-home --uid 10001 regard && install -d -o regard -m 700 /data
COPY --from=build /opt/regard /opt/regard
ENV PATH=/opt/regard/bin:$PATH REGARD_HOME=/data PYTHONUNBUFFERED=1 OMP_WAIT_POLICY=PASSIVE
USER regard
VOLUME /data
EXPOSE 8000
STOPSIGNAL SIGTERM
HEALTHCHECK CMD ["python", "-c", "import urllib.request as u; u.urlopen('http://127.0.0.1:8000/ready', timeout=3)"]
ENTRYPOINT ["regard"]
CMD ["serve", "--host", "0.0.0.0"]
