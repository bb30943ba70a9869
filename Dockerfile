FROM python:3.12-slim
WORKDIR /src
COPY . .
RUN pip install --no-cache-dir torch --index-url https://download.pytorch.org/whl/cpu
RUN pip install --no-cache-dir ".[atari,video]"
ENV MUJOCO_GL=egl
WORKDIR /work
ENTRYPOINT ["maze-run"]
