"""Starts the ranks of a benchmark of PyTorch on this host."""
import os
import signal
import sys
import tempfile
import traceback


def run(args, rank_main):
    """Runs rank_main(args, rank, rendezvous) in args.world processes, which have PyTorch from this one. Returns whether all
    ended well. The rendezvous is the path of a file for init_process_group."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(args.world):
            pid = os.fork()
            if pid == 0:
                code = 1
                try:
                    rank_main(args, rank, os.path.join(folder, "meet"))
                    code = 0
                except SystemExit as e:
                    print(e, file=sys.stderr)
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    sys.stderr.flush()
                    os._exit(code)
            ranks.append(pid)
        well = True
        while ranks:
            pid, status = os.wait()
            ranks.remove(pid)
            if status and well:
                well = False
                for other in ranks:  # which would wait for it
                    os.kill(other, signal.SIGTERM)
        return well
