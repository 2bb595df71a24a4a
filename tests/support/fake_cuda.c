/* A CUDA driver without a device: what Triton calls to load a kernel and to launch it, which it prints instead. */
#include <cuda.h>
#include <stdio.h>
#include <string.h>

#define OK return CUDA_SUCCESS

CUresult cuInit(unsigned flags) { OK; }
CUresult cuDriverGetVersion(int *version) { *version = 13000; OK; }
CUresult cuDeviceGetCount(int *count) { *count = 1; OK; }
CUresult cuDeviceGet(CUdevice *device, int ordinal) { *device = ordinal; OK; }
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) { *context = (CUcontext)1; OK; }
CUresult cuCtxGetCurrent(CUcontext *context) { *context = (CUcontext)1; OK; }
CUresult cuCtxSetCurrent(CUcontext context) { OK; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = 0; OK; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; OK; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { OK; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = "refused by the driver"; OK; }

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    switch (attribute) { /* of an H200 */
    case CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN: *value = 232448; break;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; break;
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_WARP_SIZE: *value = 32; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    default: *value = 1024;
    }
    OK;
}

CUresult cuModuleLoadData(CUmodule *module, const void *image) { *module = (CUmodule)1; OK; }
CUresult cuModuleUnload(CUmodule module) { OK; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) {
    *function = (CUfunction)strdup(name);
    OK;
}
CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    switch (attribute) {
    case CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK: *value = 1024; break;
    case CU_FUNC_ATTRIBUTE_NUM_REGS: *value = 168; break; /* of any kernel */
    default: *value = 0;
    }
    OK;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { OK; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { OK; }

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    *(CUdeviceptr *)data = pointer;
    OK;
}
CUresult cuPointerGetAttributes(unsigned count, CUpointer_attribute *attributes, void **data, CUdeviceptr pointer) {
    for (unsigned i = 0; i < count; i++)
        if (attributes[i] == CU_POINTER_ATTRIBUTE_DEVICE_POINTER) *(CUdeviceptr *)data[i] = pointer;
    OK;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) {
    *status = CU_STREAM_CAPTURE_STATUS_NONE;
    OK;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **parameters, void **extra) {
    unsigned x = config->gridDimX, y = config->gridDimY, z = config->gridDimZ, threads = config->blockDimX;
    if (!x || !y || !z || x > 2147483647u || y > 65535 || z > 65535 || threads > 1024 || config->sharedMemBytes > 232448)
        return CUDA_ERROR_INVALID_VALUE;
    printf("%s %u %u %u\n", (const char *)function, x, y, z);
    fflush(stdout);
    OK;
}
