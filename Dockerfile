# thunderagent as an image:
#
#     docker build --tag thunderagent .
#     docker build --tag thunderagent --build-arg EXTRAS=kubernetes,kv-events .
#
# It needs no BuildKit. BASE_IMAGE is any image with Python 3.11 or newer as `python3`. BUILD_IMAGE, by default the
# same, has that Python, its venv module, and what pip needs to find packages; nothing of it is in the result. For the
# parts that are compiled ahead of time it needs Python's headers, too, and a C compiler, which is installed where there
# is none; without them: --build-arg COMPILE=0.
ARG BASE_IMAGE=python:3.11-slim
ARG BUILD_IMAGE

FROM ${BUILD_IMAGE:-${BASE_IMAGE}} AS build
# pip's own variable, for an index other than its default.
ARG PIP_INDEX_URL
WORKDIR /src
RUN python3 -m venv tools && python3 -m venv --without-pip /opt/thunderagent
# What it depends on has a layer of its own, which a change of the code leaves alone.
ARG EXTRAS=""
COPY pyproject.toml ./
RUN python3 -c "import os, tomllib; \
project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = os.environ['EXTRAS'].replace(',', ' ').split(); \
wanted = [project['dependencies'], *(project['optional-dependencies'][extra] for extra in extras)]; \
print(*(line for lines in wanted for line in lines), sep='\n')" > requirements.txt \
    && tools/bin/pip --python /opt/thunderagent/bin/python install --no-cache-dir --requirement requirements.txt
ARG COMPILE=1
RUN [ "$COMPILE" != 1 ] || command -v gcc || command -v cc \
    || { apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev; }
COPY README.md LICENSE setup.py ./
COPY thunderagent thunderagent
RUN THUNDERAGENT_COMPILE=$COMPILE tools/bin/pip --python /opt/thunderagent/bin/python install --no-cache-dir --no-deps .

FROM ${BASE_IMAGE}
# A number, not a name: Kubernetes can then see that it is not root, and the base needs no tools to add users.
RUN mkdir /var/lib/thunderagent && chown 65532:65532 /var/lib/thunderagent
USER 65532:65532
WORKDIR /var/lib/thunderagent
# A container's loopback is of no use: who may reach the port is said where it is published.
ENV PATH=/opt/thunderagent/bin:$PATH PYTHONUNBUFFERED=1 THUNDERAGENT_HOST=0.0.0.0
EXPOSE 8300
HEALTHCHECK --interval=10s --timeout=5s --start-period=10s CMD ["python3", "-c", "import http.client, os; \
connection = http.client.HTTPConnection('127.0.0.1', int(os.environ.get('THUNDERAGENT_PORT', '8300')), timeout=4); \
connection.request('GET', '/health'); \
exit(connection.getresponse().status != 200)"]
ENTRYPOINT ["thunderagent"]
CMD ["serve"]
COPY --from=build /opt/thunderagent /opt/thunderagent
