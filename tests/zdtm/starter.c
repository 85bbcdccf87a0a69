/*
 * Runs a program and adopts what it leaves behind, until nothing is left: the job's first process around a test, whose
 * own process becomes a daemon.
 */
#include <errno.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	if (argc < 2 || prctl(PR_SET_CHILD_SUBREAPER, 1))
		return 2;
	switch (fork()) {
	case -1:
		return 2;
	case 0:
		execv(argv[1], argv + 1);
		_exit(127);
	}
	while (wait(NULL) > 0 || errno == EINTR)
		;
	return 0;
}
