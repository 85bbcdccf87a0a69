// Process state that CRIU does not know, one kind at a time: `state KIND`.
//
// Sets the state up and checks it in each step, which it prints as "NUMBER ok" or "NUMBER wrong: WHAT". Ends with 0 after the
// step at which the file `stop` exists. Ends with 77 if this machine does not have the feature.

#define _GNU_SOURCE
#include <errno.h>
#include <immintrin.h>
#include <linux/landlock.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/rseq.h>
#include <sys/syscall.h>
#include <ucontext.h>
#include <unistd.h>

enum { ARCH_GET_XCOMP_PERM = 0x1022, ARCH_REQ_XCOMP_PERM = 0x1023, TILES = 18, DISPATCH = 59, THREADS = 4 };

static long step;

static void missing(void) { exit(77); }

static void tell(const char *wrong) {
    printf(wrong ? "%ld wrong: %s\n" : "%ld ok\n", step++, wrong);
    fflush(stdout);
    if (access("stop", F_OK) == 0) exit(0);
}

// Computes for a while without a system call, so that most snapshots find the program here.
static void compute(void) {
    for (volatile long i = 0; i < 20 * 1000 * 1000; i++) { }
}

static sigjmp_buf after_fault;
static volatile sig_atomic_t fault;

static void on_fault(int number) {
    fault = number;
    siglongjmp(after_fault, 1);
}

static void on_faults(void) {
    struct sigaction action = {.sa_handler = on_fault, .sa_flags = SA_NODEFER};
    sigaction(SIGILL, &action, NULL);
    sigaction(SIGSEGV, &action, NULL);
}

// --- AMX

struct shapes {
    unsigned char palette, start_row, reserved[14];
    unsigned short row_bytes[16];
    unsigned char rows[16];
} __attribute__((packed));

static void need_tiles(void) {
    if (syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILES)) missing();
}

static void shape_tiles(void) {
    struct shapes shapes = {.palette = 1};
    for (int i = 0; i < 3; i++) shapes.row_bytes[i] = 64, shapes.rows[i] = 16;
    asm volatile("ldtilecfg %0" ::"m"(shapes));
}

// A product of two matrices of bytes.
static unsigned long multiply(void) {
    signed char a[16][64], b[16][64];
    int c[16][16] = {{0}};
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 64; j++) a[i][j] = i + j, b[i][j] = i - j;
    shape_tiles();
    asm volatile("tileloadd (%0,%1,1),%%tmm0" ::"r"(c), "r"(64L) : "memory");
    asm volatile("tileloadd (%0,%1,1),%%tmm1" ::"r"(a), "r"(64L) : "memory");
    asm volatile("tileloadd (%0,%1,1),%%tmm2" ::"r"(b), "r"(64L) : "memory");
    asm volatile("tdpbssd %%tmm2,%%tmm1,%%tmm0" ::: "memory");
    asm volatile("tilestored %%tmm0,(%0,%1,1)" ::"r"(c), "r"(64L) : "memory");
    asm volatile("tilerelease");
    unsigned long sum = 0;
    for (int i = 0; i < 256; i++) sum = sum * 31 + (unsigned)c[i / 16][i % 16];
    return sum;
}

static void tiles(void) {
    need_tiles();
    on_faults();
    unsigned long first = multiply();
    for (;;) {
        fault = 0;
        unsigned long sum = 0;
        if (!sigsetjmp(after_fault, 1)) sum = multiply();
        tell(fault ? "AMX ends the program" : sum != first ? "the product differs" : NULL);
        compute();
    }
}

// Has permission, and uses it for the first time when `use` exists.
static void permission(void) {
    need_tiles();
    on_faults();
    for (;;) {
        unsigned long granted = 0;
        syscall(SYS_arch_prctl, ARCH_GET_XCOMP_PERM, &granted);
        fault = 0;
        if (access("use", F_OK) == 0 && !sigsetjmp(after_fault, 1)) multiply();
        tell(!(granted >> TILES & 1) ? "the permission is lost" : fault ? "AMX ends the program" : NULL);
        compute();
    }
}

static volatile long rounds[THREADS];
static const char *volatile thread_wrong;

// Keeps a tile while it computes.
static const char *keep_tile(int seed) {
    signed char kept[16][64], now[16][64];
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 64; j++) kept[i][j] = seed + i * j;
    shape_tiles();
    asm volatile("tileloadd (%0,%1,1),%%tmm1" ::"r"(kept), "r"(64L) : "memory");
    compute();
    memset(now, 0, sizeof now);
    asm volatile("tilestored %%tmm1,(%0,%1,1)" ::"r"(now), "r"(64L) : "memory");
    return memcmp(kept, now, sizeof now) ? "a tile differs" : NULL;
}

static void *keep_tiles(void *number) {
    for (int seed = (long)number;; seed++) {
        const char *wrong = keep_tile(seed);
        if (wrong) thread_wrong = wrong;
        rounds[(long)number]++;
    }
    return NULL;
}

static void live_tiles(void) {
    need_tiles();
    on_faults();
    pthread_t thread;
    for (long i = 1; i < THREADS; i++) pthread_create(&thread, NULL, keep_tiles, (void *)i);
    for (int seed = 0;; seed++) {
        fault = 0;
        const char *wrong = sigsetjmp(after_fault, 1) ? "AMX ends the program" : keep_tile(seed);
        tell(wrong ? wrong : thread_wrong);
    }
}

// --- Protection keys

// Returns true if the access is possible. The kernel gives a handler other rights, which a jump out of it keeps.
static int possible(volatile char *at, int write) {
    unsigned rights, zero;
    asm volatile("rdpkru" : "=a"(rights), "=d"(zero) : "c"(0));
    fault = 0;
    if (!sigsetjmp(after_fault, 1)) {
        char content = *at;
        if (write) *at = content;
    }
    asm volatile("wrpkru" ::"a"(rights), "c"(0), "d"(0));
    return !fault;
}

static char *page_with_key(int key, char content) {
    char *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    *page = content;
    pkey_mprotect(page, 4096, PROT_READ | PROT_WRITE, key);
    return page;
}

static void *other_rights(void *both) {
    int *keys = both;
    pkey_set(keys[0], 0);
    pkey_set(keys[1], PKEY_DISABLE_ACCESS);
    for (;;) {
        if (pkey_get(keys[0]) != 0 || pkey_get(keys[1]) != PKEY_DISABLE_ACCESS) thread_wrong = "a thread's rights differ";
        compute();
    }
    return NULL;
}

// One key of whose memory this thread may only read, one of whose memory it may do nothing if `hidden`, and a free one between.
static void protection(int hidden) {
    static int keys[2];
    int between;
    keys[0] = pkey_alloc(0, 0), between = pkey_alloc(0, 0), keys[1] = pkey_alloc(0, 0);
    if (keys[1] < 0) missing();
    pkey_free(between);
    on_faults();
    char *a = page_with_key(keys[0], 'a'), *b = page_with_key(keys[1], 'b');
    pthread_t thread;
    pthread_create(&thread, NULL, other_rights, keys);
    int rights = hidden ? PKEY_DISABLE_ACCESS : PKEY_DISABLE_WRITE;
    pkey_set(keys[0], PKEY_DISABLE_WRITE);
    pkey_set(keys[1], rights);
    for (;;) {
        const char *wrong = thread_wrong;
        if (possible(a, 1) || !possible(a, 0) || *a != 'a') wrong = "the first page";
        if (possible(b, 0) == hidden) wrong = "the second page";
        if (pkey_get(keys[1]) != rights) wrong = "the rights";
        int next = pkey_alloc(0, 0);
        if (next != between) wrong = "the keys";
        pkey_free(next);
        pkey_set(keys[1], 0);
        if (*b != 'b') wrong = "the second page's content";
        pkey_set(keys[1], rights);
        tell(wrong);
        compute();
    }
}

// A key beside memory that may only be executed, for which the kernel uses a key of its own.
static void unreadable_code(void) {
    int key = pkey_alloc(0, 0);
    if (key < 0) missing();
    page_with_key(key, 'a');
    mmap(NULL, 4096, PROT_EXEC, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (;;) {
        tell(NULL);
        compute();
    }
}

static void keys(void) { protection(0); }
static void hidden_keys(void) { protection(1); }

// --- Dispatch of system calls to a handler

static volatile char is_blocked;
enum { ANSWER = 4242 };

static void on_call(int number, siginfo_t *about, void *context) {
    (void)number, (void)about;
    is_blocked = 0;
    ((ucontext_t *)context)->uc_mcontext.gregs[REG_RAX] = ANSWER;
}

static void dispatch(void) {
    struct sigaction action = {.sa_sigaction = on_call, .sa_flags = SA_SIGINFO};
    sigaction(SIGSYS, &action, NULL);
    if (prctl(DISPATCH, 1, 0, 0, &is_blocked)) missing();
    for (;;) {
        is_blocked = 1;
        compute();
        long answer = syscall(SYS_getppid);
        is_blocked = 0;
        tell(answer != ANSWER ? "a call is not dispatched" : NULL);
    }
}

// --- A restartable sequence, from which the kernel must jump away when the thread is interrupted

// Returns how often the thread was switched away from, or -1 if that may have happened during the question itself.
static long switches(void) {
    unsigned long begin = __builtin_ia32_rdtsc();
    struct rusage usage;
    getrusage(RUSAGE_THREAD, &usage);
    return __builtin_ia32_rdtsc() - begin < 20 * 1000 ? usage.ru_nvcsw + usage.ru_nivcsw : -1;
}

// Computes in a sequence. Returns true if it came to its end.
static int run_sequence(void) {
    char *area = (char *)__builtin_thread_pointer() + __rseq_offset;
    int is_done = 0;
    asm volatile(
        ".pushsection .data\n .balign 32\n 3: .long 0, 0\n .quad 1f, 2f - 1f, 4f\n .popsection\n"
        "lea 3b(%%rip), %%rax\n movq %%rax, 8(%[area])\n"
        "1: mov %[rounds], %%rcx\n 5: dec %%rcx\n jnz 5b\n movl $1, %[done]\n 2: jmp 6f\n"
        ".byte 0x0f, 0xb9, 0x3d\n .long 0x53053053\n 4: nop\n 6:\n"
        : [done] "+r"(is_done) : [area] "r"(area), [rounds] "i"(40 * 1000 * 1000) : "rax", "rcx", "memory");
    return is_done;
}

static void sequence(void) {
    if (__rseq_size == 0) missing();
    for (;;) {
        long before = switches();
        int is_done = run_sequence();
        long after = switches();
        int is_wrong = is_done && before != -1 && after != -1 && before != after;
        tell(is_wrong ? "a sequence went on after an interruption" : NULL);
    }
}

// --- Threads that CRIU does not restore as they are

static void *own_folder(void *unused) {
    if (unshare(CLONE_FS)) thread_wrong = "unshare";
    pause();
    return unused;
}

static void *own_files(void *unused) {
    if (unshare(CLONE_FILES)) thread_wrong = "unshare";
    pause();
    return unused;
}

static void with_thread(void *(*thread)(void *)) {
    pthread_t id;
    pthread_create(&id, NULL, thread, NULL);
    for (;;) {
        compute();
        tell(thread_wrong);
    }
}

static void thread_folder(void) { with_thread(own_folder); }
static void thread_files(void) { with_thread(own_files); }

static void deadline(void) {
    struct { unsigned size, policy; unsigned long flags; int nice; unsigned priority; unsigned long runtime, deadline, period; }
        attributes = {sizeof attributes, 6, 0, 0, 0, 5 * 1000 * 1000, 50 * 1000 * 1000, 50 * 1000 * 1000};
    if (syscall(SYS_sched_setattr, 0, &attributes, 0)) missing();
    for (;;) {
        compute();
        tell(NULL);
    }
}

// --- A wait for a signal that does not come

static void *wait_for_signal(void *unused) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigwaitinfo(&set, NULL);
    thread_wrong = "a wait without a time limit has ended";
    return unused;
}

static void signal_wait(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGUSR1);
    sigprocmask(SIG_BLOCK, &set, NULL);
    with_thread(wait_for_signal);
}

// --- Faults that the program handles, as language runtimes do, and calls that a handler makes

static volatile long faults_handled;

// Skips the instruction.
static void on_instruction(int number, siginfo_t *about, void *context) {
    (void)about;
    faults_handled++;
    ((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP] += number == SIGILL ? 2 : 3;
}

static void *make_calls(void *unused) {
    struct sigaction action = {.sa_sigaction = on_call, .sa_flags = SA_SIGINFO};
    sigaction(SIGSYS, &action, NULL);
    if (prctl(DISPATCH, 1, 0, 0, &is_blocked)) missing();
    for (;;) {
        is_blocked = 1;
        if (syscall(SYS_getppid) != ANSWER) thread_wrong = "a call is not dispatched";
        is_blocked = 0;
    }
    return unused;
}

static void faults(void) {
    char *page = mmap(NULL, 4096, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct sigaction action = {.sa_sigaction = on_instruction, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGILL, &action, NULL);
    pthread_t id;
    pthread_create(&id, NULL, make_calls, NULL);
    for (long made = 0;;) {
        for (int i = 0; i < 20 * 1000; i++, made += 2)
            asm volatile("movb (%0), %%al\n nop\n ud2" : : "r"(page) : "rax", "memory");
        tell(made != faults_handled ? "a fault was not handled once" : thread_wrong);
    }
}

// --- A fault's signal that the program sends itself and blocks

static void own_fault(void) {
    sigset_t set;
    sigemptyset(&set);
    sigaddset(&set, SIGSEGV);
    sigprocmask(SIG_BLOCK, &set, NULL);
    siginfo_t about = {.si_signo = SIGSEGV, .si_code = SEGV_ACCERR};
    if (syscall(SYS_rt_tgsigqueueinfo, getpid(), gettid(), SIGSEGV, &about)) missing();
    for (;;) {
        sigset_t waiting;
        sigpending(&waiting);
        tell(sigismember(&waiting, SIGSEGV) ? NULL : "the signal is lost");
        compute();
    }
}

// --- Accesses that the processor checks for alignment

static void alignment(void) {
    for (;;) {
        unsigned long flags;
        // The C library would not pass the check.
        asm volatile(
            "pushfq\n orq $0x40000, (%%rsp)\n popfq\n mov %1, %%eax\n 1: dec %%eax\n jnz 1b\n"
            "pushfq\n mov (%%rsp), %0\n andq $~0x40000, (%%rsp)\n popfq\n"
            : "=r"(flags) : "i"(200 * 1000 * 1000) : "rax", "cc", "memory");
        tell(flags & 0x40000 ? NULL : "accesses are no longer checked");
    }
}

// --- Landlock

// The program may not notice that it is no longer confined: the kernel must have told it at the beginning.
static void landlock(void) {
    struct landlock_ruleset_attr rules = {.handled_access_fs = LANDLOCK_ACCESS_FS_MAKE_REG};
    int set = syscall(SYS_landlock_create_ruleset, &rules, sizeof rules, 0);
    int is_confined = set >= 0;
    if (is_confined) {
        prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
        if (syscall(SYS_landlock_restrict_self, set, 0)) missing();
        close(set);
    }
    for (;;) {
        FILE *file = fopen("made", "w");
        if (file) fclose(file), unlink("made");
        tell(!file == is_confined ? NULL : "a rule is lost");
        compute();
    }
}

// --- A handler of SIGTRAP, while ckpt-run makes system calls for the program

static void on_trap(int number) { (void)number; }

static void trap(void) {
    signal(SIGTRAP, on_trap);
    personality(ADDR_NO_RANDOMIZE);
    for (;;) {
        struct sigaction now;
        sigaction(SIGTRAP, NULL, &now);
        raise(SIGTRAP);
        const char *wrong = now.sa_handler != on_trap ? "the handler of SIGTRAP" : NULL;
        tell(personality(0xffffffff) != ADDR_NO_RANDOMIZE ? "the personality" : wrong);
        compute();
    }
}

int main(int count, char **arguments) {
    struct { const char *name; void (*run)(void); } kinds[] = {
        {"tiles", tiles}, {"permission", permission}, {"live-tiles", live_tiles}, {"keys", keys},
        {"hidden-keys", hidden_keys}, {"unreadable-code", unreadable_code}, {"dispatch", dispatch}, {"sequence", sequence}, {"landlock", landlock}, {"trap", trap},
        {"thread-folder", thread_folder}, {"thread-files", thread_files}, {"deadline", deadline}, {"signal-wait", signal_wait}, {"faults", faults},
        {"alignment", alignment}, {"own-fault", own_fault},
    };
    for (unsigned i = 0; count == 2 && i < sizeof kinds / sizeof *kinds; i++)
        if (!strcmp(arguments[1], kinds[i].name)) kinds[i].run();
    return 2;
}
