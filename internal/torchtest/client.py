"""Has the interpreter run a program with the files, environment and folder of this process, and ends as it does."""

import json
import os
import socket
import sys

conn = socket.socket(socket.AF_UNIX)
conn.connect(sys.argv[1])
text = json.dumps([sys.argv[2:], dict(os.environ), os.getcwd()]).encode()
socket.send_fds(conn, [b"%08d" % len(text)], [0, 1, 2])
conn.sendall(text)
for f in range(3):
    os.close(f)
code = int(conn.recv(16) or 255)
if code < 0:
    os.kill(os.getpid(), -code)
os._exit(code)
