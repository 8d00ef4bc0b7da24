/* Counts the file operations below a directory, once it is armed, and breaks one of them.
 *
 * Preloaded (LD_PRELOAD), so that writers in C++ (torch.save) and Rust (safetensors) are seen as well as Python's. `kill` ends
 * the process in the middle of an operation: half of the bytes of a write are on their way, a rename has not happened.
 * `ENOSPC` and `EIO` let that operation and all later ones fail. Every operation is appended to a log, by name.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static char armed_directory[PATH_MAX];
static long break_at, done;
static int error_number, log_descriptor = -1;
static volatile int armed;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* `error` 0 kills; `at` 0 only counts. */
int fault_arm(const char *directory, long at, int error, const char *log) {
    snprintf(armed_directory, sizeof armed_directory, "%s", directory);
    break_at = at;
    error_number = error;
    done = 0;
    log_descriptor = syscall(SYS_openat, AT_FDCWD, log, O_WRONLY | O_CREAT | O_APPEND, 0644);
    armed = 1;
    return log_descriptor < 0;
}

long fault_disarm(void) {
    armed = 0;
    if (log_descriptor >= 0) syscall(SYS_close, log_descriptor);
    log_descriptor = -1;
    return done;
}

static int below(const char *path) {
    char whole[PATH_MAX * 2];
    if (path[0] != '/') {
        char here[PATH_MAX];
        if (syscall(SYS_getcwd, here, sizeof here) < 0) return 0;
        snprintf(whole, sizeof whole, "%s/%s", here, path);
        path = whole;
    }
    return strncmp(path, armed_directory, strlen(armed_directory)) == 0;
}

static int open_below(int descriptor) {
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", descriptor);
    ssize_t length = syscall(SYS_readlinkat, AT_FDCWD, link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return below(path);
}

/* Returns 1 where the operation is to fail, 2 where it is to be the last one. */
static int broken(const char *name, const char *path, int descriptor) {
    if (!armed || !(path ? below(path) : open_below(descriptor))) return 0;
    pthread_mutex_lock(&lock);
    long number = ++done;
    char line[64];
    int length = snprintf(line, sizeof line, "%s\n", name);
    if (log_descriptor >= 0) syscall(SYS_write, log_descriptor, line, length);
    pthread_mutex_unlock(&lock);
    if (!break_at || number < break_at) return 0;
    if (!error_number) return number == break_at ? 2 : 0;
    errno = error_number;
    return 1;
}

static void end(void) { syscall(SYS_kill, syscall(SYS_getpid), SIGKILL); for (;;) pause(); }

#define REAL(type, name, ...) static type (*real)(__VA_ARGS__); if (!real) real = dlsym(RTLD_NEXT, #name)
#define STOP(name, path, descriptor, failed) \
    switch (broken(name, path, descriptor)) { case 1: return failed; case 2: end(); }

#define OPEN(function) \
    int function(const char *path, int flags, ...) { \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, int); va_end(rest); \
        REAL(int, function, const char *, int, ...); \
        if (flags & (O_WRONLY | O_RDWR | O_CREAT)) STOP("open", path, 0, -1) \
        return real(path, flags, mode); }
OPEN(open)
OPEN(open64)
#define OPENAT(function) \
    int function(int at, const char *path, int flags, ...) { \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, int); va_end(rest); \
        REAL(int, function, int, const char *, int, ...); \
        if (flags & (O_WRONLY | O_RDWR | O_CREAT)) STOP("open", path, 0, -1) \
        return real(at, path, flags, mode); }
OPENAT(openat)
OPENAT(openat64)
#define FOPEN(function) \
    FILE *function(const char *path, const char *mode) { \
        REAL(FILE *, function, const char *, const char *); \
        if (mode[0] != 'r') STOP("open", path, 0, NULL) \
        return real(path, mode); }
FOPEN(fopen)
FOPEN(fopen64)

ssize_t write(int descriptor, const void *bytes, size_t count) {
    REAL(ssize_t, write, int, const void *, size_t);
    switch (broken("write", NULL, descriptor)) {
        case 1: return -1;
        case 2: syscall(SYS_write, descriptor, bytes, count / 2); end();
    }
    return real(descriptor, bytes, count);
}
ssize_t writev(int descriptor, const struct iovec *parts, int count) {
    REAL(ssize_t, writev, int, const struct iovec *, int);
    switch (broken("write", NULL, descriptor)) {
        case 1: return -1;
        case 2: syscall(SYS_writev, descriptor, parts, count / 2); end();
    }
    return real(descriptor, parts, count);
}
#define PWRITE(function) \
    ssize_t function(int descriptor, const void *bytes, size_t count, off_t place) { \
        REAL(ssize_t, function, int, const void *, size_t, off_t); \
        STOP("write", NULL, descriptor, -1) \
        return real(descriptor, bytes, count, place); }
PWRITE(pwrite)
PWRITE(pwrite64)
#define ON_DESCRIPTOR(function) \
    int function(int descriptor) { REAL(int, function, int); STOP(#function, NULL, descriptor, -1) return real(descriptor); }
ON_DESCRIPTOR(fsync)
ON_DESCRIPTOR(fdatasync)
#define ON_PATH(function) \
    int function(const char *path) { REAL(int, function, const char *); STOP(#function, path, 0, -1) return real(path); }
ON_PATH(unlink)
ON_PATH(rmdir)
int mkdir(const char *path, mode_t mode) {
    REAL(int, mkdir, const char *, mode_t);
    STOP("mkdir", path, 0, -1)
    return real(path, mode);
}
int rename(const char *from, const char *to) {
    REAL(int, rename, const char *, const char *);
    STOP("rename", to, 0, -1)
    return real(from, to);
}
int unlinkat(int at, const char *path, int flags) {
    REAL(int, unlinkat, int, const char *, int);
    if (armed && open_below(at)) STOP("unlink", NULL, at, -1)
    return real(at, path, flags);
}
int ftruncate64(int descriptor, off_t length) {
    REAL(int, ftruncate64, int, off_t);
    STOP("ftruncate", NULL, descriptor, -1)
    return real(descriptor, length);
}
