// Preloaded into ckpt-run: fanotify_init fails as it does without privilege.
#include <errno.h>

int fanotify_init(unsigned flags, unsigned event_flags)
{
	(void)flags;
	(void)event_flags;
	errno = EPERM;
	return -1;
}
