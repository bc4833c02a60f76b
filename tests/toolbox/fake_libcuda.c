/* CUDA's driver as far as a launch asks for it. It launches the kernel `twice` of the tests: of the
 * first block, on the CPU's memory. Each call is printed, so a test reads what arrived. */
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static int context, module_, function_; /* their addresses are the handles */

static int init(unsigned flags) { return 0; }
static int version(int *found) { return *found = 13000, 0; }
static int device_get(int *device, int index) { return *device = index, index > 1 ? 101 : 0; }
static int retain(void **found, int device) {
    return printf("retain %d\n", device), *found = &context, 0;
}
static int set_current(void *wanted) { return printf("current %d\n", wanted == &context), 0; }
static int load(void **found, const char *image) {
    printf("load %.3s\n", image + 1);
    return *found = &module_, memcmp(image, "\177ELF", 4) ? 200 : 0;
}
static int get_function(void **found, void *module, const char *name) {
    return *found = &function_, module == &module_ && !strcmp(name, "twice") ? 0 : 500;
}
static int set_attribute(void *function, int which, int value) {
    return printf("attribute %d %d\n", which, value), 0;
}
static int launch(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                  unsigned bz, unsigned shared, void *stream, void **values, void **extra) {
    printf("launch %u %u %u, %u %u %u, %u bytes, stream %zu, extra %p\n", gx, gy, gz, bx, by, bz,
           shared, (size_t)stream, (void *)extra);
    if (function != &function_ || bx * by * bz > 1024) return 1;
    float *x = *(float **)values[0];
    int64_t n = *(int64_t *)values[1];
    float factor = *(float *)values[2];
    for (int64_t i = 0; i < n && i < bx; ++i) x[i] *= factor;
    return 0;
}
static int error_string(int status, const char **text) {
    return *text = status == 500 ? "named symbol not found" : "said by the fake", 0;
}

int cuGetProcAddress_v2(const char *name, void **found, int version_, uint64_t flags, int *status) {
    static const struct { const char *name; void *function; } known[] = {
        {"cuInit", init}, {"cuDriverGetVersion", version}, {"cuDeviceGet", device_get},
        {"cuDevicePrimaryCtxRetain", retain}, {"cuCtxSetCurrent", set_current},
        {"cuModuleLoadData", load}, {"cuModuleGetFunction", get_function},
        {"cuFuncSetAttribute", set_attribute}, {"cuLaunchKernel", launch},
        {"cuGetErrorString", error_string}, {"cuGetProcAddress", cuGetProcAddress_v2},
    };
    *found = 0;
    for (unsigned i = 0; i < sizeof known / sizeof *known; ++i)
        if (!strcmp(known[i].name, name)) *found = known[i].function;
    if (status) *status = *found ? 0 : 1;
    return *found ? 0 : 500;
}
int cuGetProcAddress(const char *name, void **found, int version_, uint64_t flags) {
    return cuGetProcAddress_v2(name, found, version_, flags, 0);
}
