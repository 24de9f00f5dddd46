# The image of hosts with more packages on top. docker/up builds it where a cluster file has requirements beside it
# (CLUSTER.requirements.txt); its folder holds them as requirements.txt, and wheels and certificates that were handed in.
ARG IMAGE=hetero
FROM ${IMAGE}
USER root
ARG PIP_INDEX_URL=
ARG PIP_EXTRA_INDEX_URL=
COPY . /given/
RUN sh /given/stage more
USER hetero
