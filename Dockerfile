# The service for plugins and workflows, from this clone:  docker build -t keyloft .
FROM python:3.11-slim
COPY . /clone
RUN pip install --no-cache-dir --constraint /clone/constraints.txt "/clone[server]" && rm -r /clone
RUN useradd --uid 10001 keyloft && install --directory --owner=keyloft --mode=0700 /data
USER keyloft
WORKDIR /data
VOLUME /data
ENV KEYLOFT_DATABASE_URL=sqlite:////data/keyloft.db KEYLOFT_HTTP=0.0.0.0:9464 KEYLOFT_LOG_FORMAT=json
EXPOSE 9464
HEALTHCHECK --start-period=10s --timeout=6s CMD ["python", "-c", \
    "import urllib.request; urllib.request.urlopen('http://127.0.0.1:9464/healthz', timeout=5)"]
ENTRYPOINT ["keyloft"]
CMD ["serve"]
