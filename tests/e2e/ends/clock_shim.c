/* A wall clock that can be set for one imitated host alone: preload it, and write seconds into a file.
 *
 * WALL_CLOCK_FILE names a file of 8 bytes, an int64 of seconds that are added to the wall clock of every process that
 * has this library preloaded; it is mapped, so that a new value counts at once everywhere. The monotonic clock is left
 * alone, and so is what waits by it. Waits until a wall clock time are moved along, as the kernel moves them when a
 * clock is really set. Times of files are the kernel's.
 *
 * Debian's libfaketime does not serve: it fails clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME), by which Python
 * sleeps, where the monotonic clock is to be left alone.
 *
 *     cc -shared -fPIC -O1 -o clock_shim.so clock_shim.c
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile int64_t *offset;

static int64_t offset_s(void) {
    return offset == NULL ? 0 : *offset;
}

/* Before any constructor that might look at the clock; the system call itself, since open() may not be ready. */
__attribute__((constructor(101))) static void map_offset(void) {
    const char *path = getenv("WALL_CLOCK_FILE");
    int fd = path == NULL ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return;
    void *page = mmap(NULL, sizeof *offset, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (page != MAP_FAILED)
        offset = page;
}

static long real_clock_gettime(clockid_t id, struct timespec *now) {
    static int (*next)(clockid_t, struct timespec *);
    if (next == NULL)
        *(void **)&next = dlsym(RTLD_NEXT, "clock_gettime");
    return next(id, now);
}

static int is_wall(clockid_t id) {
    return id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE || id == CLOCK_TAI;
}

int clock_gettime(clockid_t id, struct timespec *now) {
    int result = real_clock_gettime(id, now);
    if (result == 0 && is_wall(id))
        now->tv_sec += offset_s();
    return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec exact;
    int result = clock_gettime(CLOCK_REALTIME, &exact);
    if (result == 0) {
        now->tv_sec = exact.tv_sec;
        now->tv_usec = exact.tv_nsec / 1000;
    }
    return result;
}

time_t time(time_t *now) {
    struct timespec exact;
    clock_gettime(CLOCK_REALTIME, &exact);
    if (now != NULL)
        *now = exact.tv_sec;
    return exact.tv_sec;
}

int timespec_get(struct timespec *now, int base) {
    return base == TIME_UTC && clock_gettime(CLOCK_REALTIME, now) == 0 ? base : 0;
}

/* The kernel's time of a deadline by our wall clock. */
static const struct timespec *moved(const struct timespec *deadline, struct timespec *real) {
    if (deadline == NULL)
        return NULL;
    *real = *deadline;
    real->tv_sec -= offset_s();
    if (real->tv_sec < 0)
        real->tv_sec = real->tv_nsec = 0;
    return real;
}

/* dlsym finds the oldest version of these, of before 2002. */
#define NEXT(name, version, ...)                                   \
    static int (*next)(__VA_ARGS__);                               \
    if (next == NULL)                                              \
        *(void **)&next = dlvsym(RTLD_NEXT, name, version);        \
    if (next == NULL)                                              \
    *(void **)&next = dlsym(RTLD_NEXT, name)

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
    NEXT("pthread_cond_timedwait", "GLIBC_2.3.2", pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
    struct timespec real;
    int by_wall = (condition->__data.__wrefs & 2) == 0; /* glibc: 2 is set by pthread_condattr_setclock(MONOTONIC) */
    return next(condition, mutex, by_wall ? moved(deadline, &real) : deadline);
}

int pthread_cond_clockwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, clockid_t id,
                           const struct timespec *restrict deadline) {
    NEXT("pthread_cond_clockwait", "GLIBC_2.34", pthread_cond_t *, pthread_mutex_t *, clockid_t,
         const struct timespec *);
    struct timespec real;
    return next(condition, mutex, id, is_wall(id) ? moved(deadline, &real) : deadline);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict mutex, const struct timespec *restrict deadline) {
    NEXT("pthread_mutex_timedlock", "GLIBC_2.34", pthread_mutex_t *, const struct timespec *);
    struct timespec real;
    return next(mutex, moved(deadline, &real));
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
    NEXT("sem_timedwait", "GLIBC_2.34", sem_t *, const struct timespec *);
    struct timespec real;
    return next(semaphore, moved(deadline, &real));
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t id, const struct timespec *restrict deadline) {
    NEXT("sem_clockwait", "GLIBC_2.34", sem_t *, clockid_t, const struct timespec *);
    struct timespec real;
    return next(semaphore, id, is_wall(id) ? moved(deadline, &real) : deadline);
}

int clock_nanosleep(clockid_t id, int flags, const struct timespec *request, struct timespec *rest) {
    static int (*next)(clockid_t, int, const struct timespec *, struct timespec *);
    if (next == NULL)
        *(void **)&next = dlsym(RTLD_NEXT, "clock_nanosleep");
    struct timespec real;
    return next(id, flags, is_wall(id) && flags & TIMER_ABSTIME ? moved(request, &real) : request, rest);
}

/* Abseil, in gRPC and TensorFlow, waits by the system call itself. */
long syscall(long number, ...) {
    static long (*next)(long, ...);
    if (next == NULL)
        *(void **)&next = dlsym(RTLD_NEXT, "syscall");
    long a[6];
    va_list arguments;
    va_start(arguments, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(arguments, long);
    va_end(arguments);
    struct timespec real;
    if (number == SYS_futex && a[3] != 0 && (a[1] & FUTEX_CLOCK_REALTIME) && (a[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET)
        a[3] = (long)moved((const struct timespec *)a[3], &real);
    if (number == SYS_clock_gettime)
        return clock_gettime((clockid_t)a[0], (struct timespec *)a[1]);
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
